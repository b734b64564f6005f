"""Keeps the job's history as the root, and what a next root would need as anybody.

A thread of its own writes; neither the training nor its end wait for the store, or not for long.
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
MOST_RECORDS: Final = 1000  # of a file that is written again and again; then a new one begins
DEAD_SECONDS: Final = 600.0  # after which a file that is not complete has no writer: a call takes no longer
HELD_SECONDS: Final = 30.0  # for which what waits for the history waits at most, if the store is away


class HistoryReaders(Protocol):
    """Loggers and callbacks, which are given what is in the history."""

    def begin(self) -> None:
        """This worker is the root; what is in the history and was not given is given first."""

    def retire(self) -> None:
        """This worker is the root no longer."""

    def give(self, records: Sequence[Record]) -> None:
        """These are in the history now."""

    def complete(self, done: Callable[[], None], seconds: float) -> None:
        """Training is complete: `done` is called once they have been told so, or after that time."""

    def announce_end(self, seconds: float) -> None:
        """Tells that the end waits for those that have been given something, and for how long at most."""

    def close(self, seconds: float) -> None:
        """At the worker's end: what waits is still given if that takes no longer."""


class Turns(Protocol):
    """Who calls a keeper's turns, each with whether it is the last one."""

    def wake(self) -> None:
        """The next turn comes now. Before this is called for the first time there is none."""

    def close(self, seconds: float) -> None:
        """The last turn comes, and is waited for that long."""


class TurnThread:
    """Calls the turns in a thread of its own, at the latest after FLUSH_SECONDS."""

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
    """tell: to the coordinator; any thread may say something. turns: makes who calls `_turn`."""

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
        self._informed = False  # in this term the others have told what they know
        self._ready: tuple[int, int] | None = None  # the term for which it is known what is written
        self._announced: set[int] = set()  # origins of which a commit has told the attempt
        self._file = HistoryFile(0, 0, 0)
        self._records: list[Record] = []  # in that file
        self._waiting: list[_Waiter] = []
        self._begun = self._closed = self._troubled = False  # begun: it has been the root
        self._parted = False  # it was the root, and then was not; its readers have not been told of that yet
        self._turns = turns(self._turn)

    # in the engine's thread

    def mark(self, origin: int, seconds: float, rate: float | None) -> HistoryMark:
        with self._lock:
            attempt, written = self._buffer.attempt(origin), self._buffer.written_up_to(origin)
        return HistoryMark(attempt=attempt, written=written, at=time.time(), seconds=seconds, rate=rate)

    def committed(self, origin: int, done: int, commit: Commit) -> None:
        """done: so many steps were committed before."""
        with self._lock:
            self._buffer.committed(origin, done, commit)
            if commit.history is not None and commit.history.attempt:
                self._announced.add(origin)
            if commit.checkpoint is not None:
                self._hurry()  # what leads to a checkpoint should be in the history when the job goes back to it

    def take_role(self, plan: Plan, leads: bool) -> None:
        with self._lock:
            self._buffer.began(plan.origin, plan.first_step)
            if plan.moved:
                self._buffer.moved(plan.origin)
            if not leads:
                self._parted = self._parted or self._term is not None
                self._term = None
                self._hurry()  # for those who wait
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
        """Called once all that is known by now is written, after a while in any case; by any thread."""
        with self._lock:
            if self._term is not None and not self._closed:
                self._waiting.append(_Waiter(until=time.monotonic() + HELD_SECONDS, callback=callback))
                self._hurry()
                return
        callback()

    def complete(self, callback: Callable[[], None]) -> None:
        """Training is complete: called once what led to it is written, and callbacks have been told, after a while in
        any case; by any thread.
        """
        if self._readers is None:
            self.when_written(callback)
        else:
            self.when_written(partial(self._readers.complete, callback, HELD_SECONDS))

    def announce_end(self, logger_seconds: float) -> None:
        """Tells for what the end will wait, if it is for something."""
        if self._readers is not None:
            self._readers.announce_end(logger_seconds)

    def close(self, seconds: float, logger_seconds: float = 0.0) -> None:
        """Writes what is left, if that takes no longer; loggers have their own time."""
        with self._lock:
            self._closed = True
        self._turns.close(seconds)
        if self._readers is not None:
            self._readers.close(logger_seconds)

    # in the thread of its own

    def _turn(self, last: bool) -> None:
        """Writes what is due. last: all of it, as nothing comes after."""
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
        """Returns those who have waited for what is written now: what comes meanwhile is waited for by others."""
        with self._lock:
            term, informed, waiting = self._term, self._informed, tuple(self._waiting)
            parted, self._parted = self._parted, False
        if parted and self._readers is not None:
            self._readers.retire()
        if term is None or not (informed or last):
            return ()  # which attempt this is, and what is missing, is known when all others have told
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
                told = self._buffer.written(term[0], some)
            if self._readers is not None:
                self._readers.give(some)
            for source, number in told.items():
                self._tell(HistoryKept(source=source, number=number))
        return waiting

    def _prepare(self, term: tuple[int, int]) -> None:
        """Learn which attempt this is, and what the root before has written that nobody has heard of."""
        origin, epoch = term
        self._files.remove_partial(older=DEAD_SECONDS)
        there = self._files.all()
        newest, found = there[-1].attempt if there else 0, list[Record]()
        for attempt in sorted({file.attempt for file in there}, reverse=True):
            records = self._unmarked(origin, [file for file in there if file.attempt == attempt])
            with self._lock:
                self._buffer.recognize(records)
                found += records
                if not self._buffer.unknown_before(origin):
                    break
        with self._lock:
            attempt = self._buffer.number_attempts(origin, newest)
            self._buffer.written(origin, found)
        taken = [file.number for file in there if (file.attempt, file.epoch) == (attempt, epoch)]
        self._file, self._records = HistoryFile(attempt, epoch, max(taken, default=-1) + 1), []
        self._ready = term
        if self._readers is not None:
            self._readers.begin()

    def _unmarked(self, origin: int, files: Sequence[HistoryFile]) -> list[Record]:
        """What is in the last of these files, back to what commits have told as written."""
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
        """Those who wait for what is written, or have waited for long enough."""
        with self._lock:
            now, everybody = time.monotonic(), everybody or self._term is None
            ready = [one for one in self._waiting if everybody or one in served or one.until <= now]
            self._waiting = [one for one in self._waiting if one not in ready]
        for one in ready:
            one.callback()

    def _trouble(self, message: str) -> None:
        """Said once, until it works again."""
        logger.warning("the history is not written: %s", message)
        if not self._troubled:
            self._troubled = True
            self._tell(WorkerWarning(reason="HistoryNotWritten", message=message[:MOST_TEXT]))
