"""Kept sums of finished groups of microbatches, from the workers that ran them, for a cell's next owner.

An owner sends each sum as soon as it is finished, or a larger one that includes it, as often as that takes no more than
half of the time (`Pace`). After a loss, the worker that keeps the sums continues behind them.
"""

from bamboo_core.planning.plan import Cell
from bamboo_core.planning.portions import Range
from bamboo_trainer.frames.frame import Address, Frame


class KeptSums:
    """The kept frames of one step of each cell, none of which is part of another one."""

    def __init__(self) -> None:
        self._frames: dict[Cell, list[Frame]] = {}

    def keep(self, frame: Frame) -> None:
        """Keep a sum instead of the sums that are part of it, unless it is itself part of a known one."""
        address = frame.address
        known = [one for one in self._frames.get(address.cell, ()) if one.address.step >= address.step]
        if any(one.address.step > address.step or _is_part(address, one.address) for one in known):
            return
        others = [one for one in known if not _is_part(one.address, address)]
        self._frames[address.cell] = sorted([*others, frame], key=lambda one: one.address.microbatch)

    def all_of(self, cell: Cell, step: int) -> list[Frame]:
        """Return the frames of a cell's step, in order."""
        return [frame for frame in self._frames.get(cell, ()) if frame.address.step == step]

    def of(self, cell: Cell, step: int, microbatches: Range) -> list[Frame]:
        """Return the frames of the first of these microbatches (a half-open range) up to a gap."""
        found, (at, end) = list[Frame](), microbatches
        for frame in self.all_of(cell, step):
            if frame.address.microbatch == at and frame.address.part <= end:
                found.append(frame)
                at = frame.address.part
        return found

    def committed(self, step: int) -> None:
        """Drop the sums of that step and of those before it."""
        self._frames = {c: known for c, known in self._frames.items() if known and known[0].address.step > step}


def _is_part(one: Address, other: Address) -> bool:
    """Return whether a sum's microbatches are all in another sum."""
    return other.microbatch <= one.microbatch and one.part <= other.part


class Pace:
    """The pace of sending sums: not while one is in transit, nor for as many microbatches as that took."""

    def __init__(self) -> None:
        self._rests = 0

    def allows(self, *, is_sending: bool) -> bool:
        """Return whether to send a sum, after each microbatch. is_sending: the one before is in transit."""
        if is_sending:
            self._rests += 1
            return False
        if self._rests:
            self._rests -= 1
            return False
        return True
