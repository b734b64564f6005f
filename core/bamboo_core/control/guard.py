"""Messages of the guard against wrong numbers; see docs/design/determinism.md."""

from typing import Annotated

import msgspec

from bamboo_core.control.message import Count, Message
from bamboo_core.planning.plan import Cell

MOST_TEXT = 1000
Sum = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]  # of a tensor's bits


# worker -> coordinator


class StateSums(Message, frozen=True):
    """The sums of a worker's state of a stage at a version, by tensor, in words."""

    stage: Count
    version: Count
    sums: dict[str, Sum]


class SpotCheckDiffers(Message, frozen=True):
    """A worker recomputed a cell's microbatch and got other bits than the cell's owner. step: the number of steps
    committed before. message: what differs, and the result of a repetition.
    """

    cell: Cell
    step: Count
    message: Annotated[str, msgspec.Meta(max_length=MOST_TEXT)]
