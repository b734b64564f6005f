"""Messages of the guard against wrong numbers; see docs/design/determinism.md."""

from typing import Annotated

import msgspec

from bamboo_core.control.message import Count, Message
from bamboo_core.planning.plan import Cell

MOST_TEXT = 1000
Sum = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]  # of the bits of a tensor


# worker -> coordinator


class StateSums(Message, frozen=True):
    """The sums of the state that a worker holds of a stage at that version, by tensor, in words."""

    stage: Count
    version: Count
    sums: dict[str, Sum]


class SpotCheckDiffers(Message, frozen=True):
    """A worker has computed a microbatch of a cell again, and comes to other bits than the cell's owner.

    step: so many were committed before it. message: what differs, and what it came to when it was repeated.
    """

    cell: Cell
    step: Count
    message: Annotated[str, msgspec.Meta(max_length=MOST_TEXT)]
