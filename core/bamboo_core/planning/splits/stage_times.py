"""What a worker takes for the layers that it runs, or whose replica it holds: seconds, as it says."""

from collections.abc import Iterable
from typing import Annotated

import msgspec

from bamboo_core.job.spec import MOST_LAYERS

MOST_TIMES = 64  # stages of one worker that are told of
LEAST_MICROBATCHES = 8  # of a stage that must have been measured for its times to count
MOST_MICROBATCHES = 32  # of which a worker tells the median
Layer = Annotated[int, msgspec.Meta(ge=0, le=MOST_LAYERS)]
Taken = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class StageTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Medians of the newest microbatches, without what is waited for and what is repeated."""

    layers: tuple[Layer, Layer]  # the stage's, half-open
    # forward, backward: of a whole microbatch, 0 if the worker does not run the stage
    forward: Taken = 0.0
    backward: Taken = 0.0
    # the forward of each layer by itself; empty if it is not known
    each: Annotated[tuple[Taken, ...], msgspec.Meta(max_length=MOST_LAYERS)] = ()
    # how many were measured, at most those that are kept
    microbatches: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0


def forward_share(times: Iterable[StageTimes], otherwise: float) -> float:
    """The forward's share of a microbatch's time there and back, by those who run both; `otherwise` if nobody
    has said.
    """
    both = [(one.forward, one.backward) for one in times if one.forward > 0 and one.backward > 0]
    forward, backward = (sum(seconds) for seconds in zip(*both, strict=True)) if both else (0.0, 0.0)
    return forward / (forward + backward) if both else otherwise
