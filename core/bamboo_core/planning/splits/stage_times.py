"""Stage times: the seconds that a worker reports for the stages that it runs or replicates."""

from collections.abc import Iterable
from typing import Annotated

import msgspec

from bamboo_core.job.spec import MOST_LAYERS

MOST_TIMES = 64  # stages in one worker's report
LEAST_MICROBATCHES = 8  # of a stage, below which its times do not count
MOST_MICROBATCHES = 32  # over which a worker takes the median
Layer = Annotated[int, msgspec.Meta(ge=0, le=MOST_LAYERS)]
Taken = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class StageTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Medians of the newest microbatches, without waits and repetitions."""

    layers: tuple[Layer, Layer]  # the stage's, half-open
    # forward, backward: of a whole microbatch; 0 if the worker does not run the stage
    forward: Taken = 0.0
    backward: Taken = 0.0
    # the forward of each layer by itself; empty if unknown
    each: Annotated[tuple[Taken, ...], msgspec.Meta(max_length=MOST_LAYERS)] = ()
    # how many were measured, up to the number that is kept
    microbatches: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0


def forward_share(times: Iterable[StageTimes]) -> float | None:
    """Return the forward's share of a microbatch's time, from workers that run both directions; None if none has
    reported.
    """
    both = [(one.forward, one.backward) for one in times if one.forward > 0 and one.backward > 0]
    forward, backward = (sum(seconds) for seconds in zip(*both, strict=True)) if both else (0.0, 0.0)
    return forward / (forward + backward) if both else None
