"""The log of frames that this worker sent to other cells and may have to send again."""

from collections.abc import Iterator

from bamboo_core.planning.plan import Cell
from bamboo_trainer.frames.frame import Address, Frame


class MessageLog:
    """Frames by destination cell, kept for two steps: the commit of step k drops frames older than k."""

    def __init__(self) -> None:
        self._frames: dict[Cell, dict[Address, Frame]] = {}

    def add(self, frame: Frame) -> None:
        """Add a frame as the newest, replacing an earlier copy."""
        frames = self._frames.setdefault(frame.address.cell, {})
        frames.pop(frame.address, None)
        frames[frame.address] = frame

    def get(self, address: Address) -> Frame | None:
        return self._frames.get(address.cell, {}).get(address)

    def to(self, cell: Cell) -> Iterator[Frame]:
        yield from list(self._frames.get(cell, {}).values())

    def frames(self) -> Iterator[Frame]:
        """Return the frames for all cells."""
        return (frame for logged in self._frames.values() for frame in logged.values())

    def committed(self, step: int) -> None:
        for frames in self._frames.values():
            for key in [k for k in frames if k.step < step]:
                del frames[key]
