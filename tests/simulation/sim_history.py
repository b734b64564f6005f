"""A job's history in memory. A worker may be killed before or after a write, and its earlier writes stay."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from bamboo_core.history.files import HistoryFile, HistoryFiles
from bamboo_core.history.records import Record, StepRecord, from_lines
from bamboo_trainer.worker.followers import Cursor

URL = "memory://simulated/history/job"
Strike = Callable[[str], None]


class SimHistoryFiles(HistoryFiles):
    """One worker's view of the files of a history in memory. strike: called before and after each write."""

    def __init__(self, data: dict[str, bytes], strike: Strike = lambda moment: None) -> None:
        super().__init__(URL)
        self._data, self._strike = data, strike

    def names(self) -> Sequence[str]:
        return tuple(self._data)

    def read(self, file: HistoryFile) -> list[Record]:
        return from_lines(self._data[file.name], file.name)

    def read_all(self) -> list[Record]:
        return [record for file in self.all() for record in self.read(file)]

    def read_bytes(self, name: str) -> bytes:
        return self._data.get(name, b"")

    def write_bytes(self, name: str, data: bytes) -> None:
        self._strike("before")
        self._data[name] = data
        self._strike("after")

    def remove_partial(self, *, older: float) -> None:
        """Do nothing: there are no partial files."""


def kept_by(data: Mapping[str, bytes], name: str) -> Cursor:
    """Return the saved cursor of the callback `name`; the cursor holds the callback's state."""
    return msgspec.json.decode(data[f"callback-{name}.json"], type=Cursor)


def missing_of(data: dict[str, bytes], steps: int) -> set[int]:
    """Return the numbers of the steps, from 1 to `steps`, that the history lacks."""
    there = {one.step for one in SimHistoryFiles(data).read_all() if isinstance(one, StepRecord)}
    return set(range(1, steps + 1)) - there
