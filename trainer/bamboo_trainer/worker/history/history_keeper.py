"""Keeps the job's history: as the root writes it, on every worker keeps what a next root would need.

A separate thread writes; neither the training nor its end waits for the store, or not for long.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from bamboo_core.control.protocol import MOST_TEXT, HistoryEvents, HistoryKept, Message, WorkerWarning
from bamboo_core.history.files import HistoryFile, HistoryFiles
from bamboo_core.history.records import HistoryError, Record, StepRecord
from bamboo_core.planning.plan import Plan
from bamboo_core.storage.errors import StorageError
from bamboo_trainer.frames.payloads import Commit, HistoryMark, Unwritten
from bamboo_trainer.worker.history.history_buffer import HistoryBuffer, Rates

logger = logging.getLogger(__name__)

FLUSH_SECONDS: Final = 5.0
MOST_RECORDS: Final = 1000  # of a file that is rewritten again and again; then a new one begins
DEAD_SECONDS: Final = 600.0  # after which an incomplete file has no writer: a call takes no longer
HELD_SECONDS: Final = 30.0  # the longest that anything waits for the history, if the store is unavailable


class HistoryReaders(Protocol):
    """Loggers and callbacks, which are given the records of the history."""

    def begin(self) -> None:
        """Begin as the root's readers, with records of the history that were not given yet."""

    def retire(self) -> None:
        """Stop: this worker is the root no longer."""

    def give(self, records: Sequence[Record]) -> None:
        """Give records that are in the history now."""

    def complete(self, done: Callable[[], None], seconds: float) -> None:
        """Report that training is complete, and call `done` once they know, or after that time."""

    def announce_end(self, seconds: float) -> None:
        """Report that the end waits for readers with records, and for how long at most."""

    def close(self, seconds: float) -> None:
        """Close at the worker's end, giving waiting records if that takes no longer."""


class Turns(Protocol):
    """Calls a keeper's turns, each with whether it is the last one."""

    def wake(self) -> None:
        """Call the next turn now. Before the first wake there is none."""

    def close(self, seconds: float) -> None:
        """Call the last turn, and wait for it that long."""


class TurnThread:
    """Calls the turns in a separate thread, at the latest after FLUSH_SECONDS."""

    def __init__(self, turn: Callable[[bool], None]) -> None:
        self._turn = turn
        self._changed = threading.Condition()
        self._due = self._closed = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        with self._changed:
            self._due = True
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="history", daemon=True)
                self._thread.start()

    def close(self, seconds: float) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        last = False
        while not last:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._closed, FLUSH_SECONDS)
                last, self._due = self._closed, False
            self._turn(last)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Waiter:
    """until: the time after which it is called in any case."""

    until: float
    callback: Callable[[], None]


class HistoryKeeper:
    """tell: sends to the coordinator, from any thread. turns: makes the caller of `_turn`."""

    def __init__(
        self,
        files: HistoryFiles,
        rates: Rates,
        tell: Callable[[Message], None],
        readers: HistoryReaders | None = None,
        turns: Callable[[Callable[[bool], None]], Turns] = TurnThread,
    ) -> None:
        self._files, self._tell, self._readers = files, tell, readers
        self._buffer = HistoryBuffer(rates)
        self._lock = threading.RLock()
        self._term: tuple[int, int] | None = None  # origin and epoch since which this worker is the root
        self._informed = False  # in this term the others have sent what they know
        self._ready: tuple[int, int] | None = None  # the term for which the written records are known
        self._announced: set[int] = set()  # origins whose attempt a commit has announced
        self._file = HistoryFile(0, 0, 0)
        self._records: list[Record] = []  # in that file
        self._waiting: list[_Waiter] = []
        self._begun = self._closed = self._troubled = False  # begun: it has been the root
        self._parted = False  # it stopped being the root, and its readers do not know yet
        self._turns = turns(self._turn)

    # in the engine's thread

    def mark(self, origin: int, seconds: float, rate: float | None) -> HistoryMark:
        with self._lock:
            attempt, written = self._buffer.attempt(origin), self._buffer.written_up_to(origin)
        return HistoryMark(attempt=attempt, written=written, at=time.time(), seconds=seconds, rate=rate)

    def committed(self, origin: int, done: int, commit: Commit) -> None:
        """Keep a commit's records. done: the number of steps committed before."""
        with self._lock:
            self._buffer.committed(origin, done, commit)
            if commit.history is not None and commit.history.attempt:
                self._announced.add(origin)
            if commit.checkpoint is not None:
                self._hurry()  # the steps before a checkpoint should be in the history when the job goes back to it

    def take_role(self, plan: Plan, leads: bool) -> None:
        with self._lock:
            self._buffer.began(plan.origin, plan.first_step)
            if plan.moved:
                self._buffer.moved(plan.origin)
            if not leads:
                self._parted = self._parted or self._term is not None
                self._term = None
                self._hurry()  # to release those that wait
            elif self._term is None or self._term[0] != plan.origin:
                self._term, self._informed, self._begun = (plan.origin, plan.epoch), False, True
                self._hurry()

    def informed(self) -> None:
        with self._lock:
            if self._term is not None and not self._informed:
                self._informed = True
                self._hurry()

    def unwritten(self) -> list[Unwritten]:
        with self._lock:
            return self._buffer.unwritten()

    def heard(self, records: Unwritten) -> None:
        with self._lock:
            self._buffer.heard(records)

    # in the worker's thread

    def happened(self, message: HistoryEvents) -> None:
        with self._lock:
            self._buffer.happened(message)

    def when_written(self, callback: Callable[[], None]) -> None:
        """Call back once all that is known by now is written, after a while in any case; from any thread."""
        with self._lock:
            if self._term is not None and not self._closed:
                self._waiting.append(_Waiter(until=time.monotonic() + HELD_SECONDS, callback=callback))
                self._hurry()
                return
        callback()

    def complete(self, callback: Callable[[], None]) -> None:
        """Call back once training's last steps are written, and callbacks know that it is complete; after a while in
        any case; from any thread.
        """
        if self._readers is None:
            self.when_written(callback)
        else:
            self.when_written(partial(self._readers.complete, callback, HELD_SECONDS))

    def announce_end(self, logger_seconds: float) -> None:
        """Report what the end waits for, if anything."""
        if self._readers is not None:
            self._readers.announce_end(logger_seconds)

    def close(self, seconds: float, logger_seconds: float = 0.0) -> None:
        """Write the remaining records, if that takes no longer; loggers have their own time."""
        with self._lock:
            self._closed = True
        self._turns.close(seconds)
        if self._readers is not None:
            self._readers.close(logger_seconds)

    # in the separate thread

    def _turn(self, last: bool) -> None:
        """Write what is due. last: everything, as no turn follows."""
        served: Sequence[_Waiter] = ()
        try:
            served = self._flush(last)
        except (StorageError, HistoryError) as error:
            self._trouble(str(error))
        except Exception as error:  # a thread that ends in silence would leave others waiting
            logger.exception("the history was not written")
            self._trouble(f"{type(error).__name__}: {error}")
        self._release(last, served)

    def _flush(self, last: bool) -> Sequence[_Waiter]:
        """Write what is due; return the waiters for what is written now, not for what arrives meanwhile."""
        with self._lock:
            term, informed, waiting = self._term, self._informed, tuple(self._waiting)
            parted, self._parted = self._parted, False
        if parted and self._readers is not None:
            self._readers.retire()
        if term is None or not (informed or last):
            return ()  # attempt and gaps are known once all others have reported
        if self._ready != term:
            self._prepare(term)
        with self._lock:
            if term[0] not in self._announced and not last and not self._waiting:
                return ()  # another root might count this attempt once more
            pending = self._buffer.pending(term[0], informed=informed)
        while pending:
            room = max(1, MOST_RECORDS - len(self._records))
            some, pending = pending[:room], pending[room:]
            self._files.write(self._file, [*self._records, *some])
            self._records += some
            self._troubled = False
            if len(self._records) >= MOST_RECORDS:
                self._file = HistoryFile(self._file.attempt, self._file.epoch, self._file.number + 1)
                self._records = []
            with self._lock:
                newest = self._buffer.written(term[0], some)
            if self._readers is not None:
                self._readers.give(some)
            for source, number in newest.items():
                self._tell(HistoryKept(source=source, number=number))
        return waiting

    def _prepare(self, term: tuple[int, int]) -> None:
        """Learn which attempt this is, and which records of the root before are written but unknown here."""
        origin, epoch = term
        self._files.remove_partial(older=DEAD_SECONDS)
        files = self._files.all()
        newest, found = files[-1].attempt if files else 0, list[Record]()
        for attempt in sorted({file.attempt for file in files}, reverse=True):
            records = self._unmarked(origin, [file for file in files if file.attempt == attempt])
            with self._lock:
                self._buffer.recognize(records)
                found += records
                if not self._buffer.unknown_before(origin):
                    break
        with self._lock:
            attempt = self._buffer.number_attempts(origin, newest)
            self._buffer.written(origin, found)
        taken = [file.number for file in files if (file.attempt, file.epoch) == (attempt, epoch)]
        self._file, self._records = HistoryFile(attempt, epoch, max(taken, default=-1) + 1), []
        self._ready = term
        if self._readers is not None:
            self._readers.begin()

    def _unmarked(self, origin: int, files: Sequence[HistoryFile]) -> list[Record]:
        """Return the records of the last of these files, back to those that commits have reported as written."""
        with self._lock:
            last = self._buffer.unread_up_to(origin)
        found: list[Record] = []
        for file in reversed(files):
            records = self._files.read(file)
            found = [*records, *found]
            if any(isinstance(record, StepRecord) and record.step <= last for record in records):
                break
        return found

    def _hurry(self) -> None:
        if self._begun:
            self._turns.wake()

    def _release(self, everybody: bool, served: Sequence[_Waiter]) -> None:
        """Call those whose records are written, or that have waited long enough."""
        with self._lock:
            now, everybody = time.monotonic(), everybody or self._term is None
            ready = [one for one in self._waiting if everybody or one in served or one.until <= now]
            self._waiting = [one for one in self._waiting if one not in ready]
        for one in ready:
            one.callback()

    def _trouble(self, message: str) -> None:
        """Report the trouble once, until writing works again."""
        logger.warning("the history is not written: %s", message)
        if not self._troubled:
            self._troubled = True
            self._tell(WorkerWarning(reason="HistoryNotWritten", message=message[:MOST_TEXT]))
