"""What this worker sent to other cells and may have to send again."""

from collections.abc import Iterator

from bamboo.planning.plan import Cell
from bamboo_trainer.transport.frames import Address, Frame


class MessageLog:
    """Frames by the cell they are for, kept for two steps: a commit of step k forgets what is older than k.

    storages: bytes of what their tensors live in, by address; several may share one.
    """

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        self._uses: dict[int, int] = {}
        self._frames: dict[Cell, dict[Address, Frame]] = {}

    def add(self, frame: Frame) -> None:
        for tensor in frame.tensors:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            self.storages[address] = storage.nbytes()
            self._uses[address] = self._uses.get(address, 0) + 1
        frames = self._frames.setdefault(frame.address.cell, {})
        if frame.address in frames:
            self._remove(frames, frame.address)
        frames[frame.address] = frame

    def get(self, address: Address) -> Frame | None:
        return self._frames.get(address.cell, {}).get(address)

    def to(self, cell: Cell) -> Iterator[Frame]:
        yield from list(self._frames.get(cell, {}).values())

    def committed(self, step: int) -> None:
        for frames in self._frames.values():
            for key in [k for k in frames if k.step < step]:
                self._remove(frames, key)

    def _remove(self, frames: dict[Address, Frame], key: Address) -> None:
        for tensor in frames.pop(key).tensors:
            address = tensor.untyped_storage().data_ptr()
            self._uses[address] -= 1
            if not self._uses[address]:
                del self._uses[address], self.storages[address]
