"""What this worker sent to other cells and may have to send again."""

from collections.abc import Iterator

from bamboo.plan import Cell
from bamboo_trainer.frames import Address, Frame


class MessageLog:
    """Frames by the cell they are for, kept for two steps: a commit of step k forgets what is older than k."""

    def __init__(self) -> None:
        self._frames: dict[Cell, dict[Address, Frame]] = {}

    def add(self, frame: Frame) -> None:
        self._frames.setdefault(frame.address.cell, {})[frame.address] = frame

    def get(self, address: Address) -> Frame | None:
        return self._frames.get(address.cell, {}).get(address)

    def to(self, cell: Cell) -> Iterator[Frame]:
        yield from list(self._frames.get(cell, {}).values())

    def committed(self, step: int) -> None:
        for frames in self._frames.values():
            for key in [k for k in frames if k.step < step]:
                del frames[key]

    def nbytes(self) -> int:
        return sum(t.nbytes for frames in self._frames.values() for f in frames.values() for t in f.tensors)
