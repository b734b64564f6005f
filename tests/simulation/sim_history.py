"""A worker's part in a job's history without threads: the real keeper, and real deliveries to the task's callbacks.

A turn writes what is due and gives it to the callbacks. Whoever is killed dies before or after something is written,
and what it had written stays.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bamboo_core.control.protocol import Message
from bamboo_core.history.files import HistoryFile, HistoryFiles
from bamboo_core.history.merge import merged
from bamboo_core.history.records import GapRecord, Record, StepRecord, from_lines
from bamboo_trainer.callbacks import Callback, MakeCallback
from bamboo_trainer.loggers.interface import LoggerFacts
from bamboo_trainer.worker.history.callback_calls import CallbackCalls, Called
from bamboo_trainer.worker.history.history_buffer import Rates
from bamboo_trainer.worker.history.history_keeper import HistoryKeeper
from bamboo_trainer.worker.history.logging_threads import Delivery
from bamboo_trainer.worker.history.reached import reached

URL = "memory://simulated/history/job"
FACTS = LoggerFacts(job="job", run="r")
Strike = Callable[[str], None]


class Steps(Callback):
    """Keeps the number and the loss of each step that it was told of, and then that it was told of the end."""

    def __init__(self, facts: LoggerFacts) -> None:
        super().__init__(facts)
        self.told: list[Any] = []

    def on_step(self, step: StepRecord) -> None:
        self.told.append([step.step, step.loss])

    def on_end(self, steps: int) -> None:
        self.told.append(steps)

    def state_dict(self) -> Any:
        return self.told

    def load_state_dict(self, state: Any) -> None:
        self.told = list(state)


class SimHistoryFiles(HistoryFiles):
    """One worker's view of the files of a history in memory. strike: called before and after each write."""

    def __init__(self, data: dict[str, bytes], strike: Strike = lambda moment: None) -> None:
        super().__init__(URL)
        self._data, self._strike = data, strike

    def names(self, folder: str = "") -> Sequence[str]:
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
        """There are none."""


class _Deliveries:
    """See `HistoryReaders`: the callbacks, each called in the turns."""

    def __init__(
        self, callbacks: Mapping[str, MakeCallback], files: HistoryFiles, tell: Callable[[Message], None]
    ) -> None:
        self._callbacks, self._files, self._tell = callbacks, files, tell
        self._deliveries: list[Delivery] = []
        self._waiting: list[Record] = []
        self._completed: list[Callable[[], None]] = []

    def begin(self) -> None:
        if not self._deliveries:
            for name, make in self._callbacks.items():
                self._deliveries.append(Delivery(CallbackCalls(name, make, FACTS, self._tell), self._files))

    def retire(self) -> None:
        self._deliveries, self._waiting = [], []

    def give(self, records: Sequence[Record]) -> None:
        self._waiting += records

    def complete(self, done: Callable[[], None], seconds: float) -> None:
        self._completed.append(done)

    def announce_end(self, seconds: float) -> None:
        pass

    def close(self, seconds: float) -> None:
        pass

    def turn(self) -> None:
        given, completed = self._waiting, self._completed
        self._waiting, self._completed = [], []
        for delivery in self._deliveries:
            delivery.write(given, complete=bool(completed))
        for done in completed:
            done()


class _Turns:
    """See `Turns`."""

    def __init__(self, turn: Callable[[bool], None]) -> None:
        self.turn, self.begun = turn, False

    def wake(self) -> None:
        self.begun = True

    def close(self, seconds: float) -> None:
        pass


class SimHistory:
    """What a worker has of it. data: the files of the whole job."""

    def __init__(
        self,
        data: dict[str, bytes],
        callbacks: Mapping[str, MakeCallback],
        batch: int,
        tell: Callable[[Message], None],
        strike: Strike,
    ) -> None:
        files = SimHistoryFiles(data, strike)
        self._deliveries = _Deliveries(callbacks, files, tell)
        self._turns: list[_Turns] = []
        self.keeper = HistoryKeeper(files, Rates(batch=batch), tell, self._deliveries, self._made)

    def _made(self, turn: Callable[[bool], None]) -> _Turns:
        self._turns.append(_Turns(turn))
        return self._turns[0]

    def turn(self) -> None:
        """Does all that is due. What kills the worker comes from here."""
        if self._turns[0].begun:
            self._turns[0].turn(False)
            self._deliveries.turn()


def kept_by(data: Mapping[str, bytes], name: str) -> Called:
    """How far a callback has been called, and what it keeps."""
    return reached(data.get(f"callback-{name}.json", b""), Called)


def gaps_of(data: dict[str, bytes]) -> set[int]:
    """The steps of which the history says that everybody who knew them was lost before they were written."""
    records = merged(SimHistoryFiles(data).read_all())
    return {n for gap in records if isinstance(gap, GapRecord) for n in range(gap.first, gap.last + 1)}
