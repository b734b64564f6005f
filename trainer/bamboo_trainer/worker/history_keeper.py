"""The keeper of the job's history: the root writes it, and every worker keeps the records that a next root would need.

A root writes all commits that any worker knows and that are not known to be in the history; readers merge what two
roots have written. A separate thread writes; neither the training nor its end waits for the store, or not for long.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from bamboo_core.control.protocol import MOST_TEXT, HistoryEvents, HistoryKept, Message, WorkerWarning
from bamboo_core.history.files import HistoryFile, HistoryFiles
from bamboo_core.history.records import EvaluationRecord, EventRecord, HistoryError, Record, StepRecord
from bamboo_core.planning.plan import Plan
from bamboo_core.storage.bounded import StorageError
from bamboo_trainer.commit.ports import History
from bamboo_trainer.frames import Commit, Commits, CommonState, HistoryMark
from bamboo_trainer.tasks.evaluation import finite
from bamboo_trainer.worker.followers import Followers, MakeTurns, TurnThread

MOST_KEPT: Final = 10_000  # commits, and as many events; beyond that, the oldest are dropped
SENT_AT_ONCE: Final = 1000  # commits, in one frame


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The amount of data in a step. batch: samples per step. tokens: tokens per sample; None if unknown."""

    batch: int
    tokens: int | None = None


class HistoryBuffer:
    """The newest commits and events that are not in the history yet. Every worker has a buffer, so no step is lost with
    a root.

    Commits are numbered by the steps before them. written: all commits before this number are in the history;
    the root sends it with each commit. attempt: of the job; 0: unknown. The buffer has no lock.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._commits: dict[int, Commit] = {}
        self._events: dict[tuple[str, int], EventRecord] = {}
        self._origin = self._first = 0  # first: the step with which the attempt began
        self.attempt = self.written = 0

    # events

    def obey(self, plan: Plan) -> None:
        """Follow a plan: if its states have a new origin, forget the commits from its first step on."""
        if plan.origin == self._origin:
            return
        self._origin, self.written = plan.origin, min(self.written, plan.first_step)
        self._commits = {step: commit for step, commit in self._commits.items() if step < plan.first_step}
        if not plan.moved:
            self._first, self.attempt = plan.first_step, 0

    def committed(self, step: int, commit: Commit) -> None:
        """Keep a commit, and forget the commits that its mark reports as written."""
        if commit.history is not None:
            self.attempt = commit.history.attempt or self.attempt
            self._forget(commit.history.written)
            self.heard([(step, commit)])

    def heard(self, commits: Commits) -> None:
        """Keep commits that another worker knows and the history may lack; beyond MOST_KEPT, drop the oldest."""
        for step, commit in commits:
            if commit.history is not None and step >= self.written:
                self._commits.setdefault(step, msgspec.structs.replace(commit, common=CommonState()))
        while len(self._commits) > MOST_KEPT:
            del self._commits[min(self._commits)]

    def happened(self, message: HistoryEvents) -> None:
        for event in message.events:
            self._events[message.source, event.number] = EventRecord(
                attempt=0,
                time=event.time,
                reason=event.reason,
                message=event.message,
                warning=event.warning,
                source=message.source,
                number=event.number,
            )
        while len(self._events) > MOST_KEPT:
            del self._events[next(iter(self._events))]

    def wrote(self, written: int, events: Mapping[str, int]) -> None:
        """Forget records that are in the history: commits before `written`, and events up to their source's number."""
        self._forget(written)
        self._events = {key: event for key, event in self._events.items() if key[1] > events.get(key[0], 0)}

    def _forget(self, written: int) -> None:
        if written > self.written:
            self.written = written
            self._commits = {step: commit for step, commit in self._commits.items() if step >= written}

    # queries

    @property
    def newest_attempt(self) -> int:
        """The newest attempt that a kept commit belongs to; 0 if none is known."""
        return max((commit.history.attempt for commit in self._commits.values() if commit.history), default=0)

    def knows(self, records: Sequence[Record]) -> bool:
        """Return whether a kept commit of this attempt matches one of these records by step and time."""
        times = {step + 1: commit.history.at for step, commit in self._commits.items() if commit.history}
        steps = [record for record in records if isinstance(record, StepRecord) and record.step > self._first]
        return any(times.get(record.step) == record.time for record in steps)

    def unwritten(self) -> list[Commits]:
        """Return the kept commits in pieces of SENT_AT_ONCE."""
        commits = sorted(self._commits.items())
        return [commits[at : at + SENT_AT_ONCE] for at in range(0, len(commits), SENT_AT_ONCE)]

    def pending(self, attempt: int) -> tuple[list[Record], int, dict[str, int]]:
        """Return all records to write, and the two arguments of `wrote` for later. attempt: the current attempt."""
        commits = sorted(self._commits.items())
        records: list[Record] = []
        for step, commit in commits:
            if commit.history is not None:
                records += self._records(step, commit, commit.history, attempt)
        newest: dict[str, int] = {}
        for source, number in self._events:
            newest[source] = max(number, newest.get(source, 0))
        records += [msgspec.structs.replace(event, attempt=attempt) for event in self._events.values()]
        return records, commits[-1][0] + 1 if commits else 0, newest

    def _records(self, done: int, commit: Commit, mark: HistoryMark, attempt: int) -> Iterator[Record]:
        """Yield a commit's records. done: the number of steps committed before."""
        attempt = mark.attempt or (attempt if done >= self._first else max(1, attempt - 1))
        if commit.evaluation:
            yield EvaluationRecord(attempt=attempt, step=done, time=mark.at, metrics=_finite_ones(commit.evaluation))
        if not commit.microbatches:
            return  # the job is over; this was the evaluation of its last state
        rates, step, seconds = self._rates, done + 1, mark.seconds or None
        tokens = None if rates.tokens is None else rates.tokens * rates.batch
        yield StepRecord(
            attempt=attempt,
            step=step,
            time=mark.at,
            loss=finite(commit.loss),
            gradient_norm=finite(commit.norm),
            learning_rate=mark.rate,
            seconds=seconds,
            samples=step * rates.batch,
            samples_per_second=rates.batch / seconds if seconds else None,
            tokens=None if tokens is None else step * tokens,
            tokens_per_second=tokens / seconds if tokens and seconds else None,
            skipped=commit.skipped,
            checkpoint=commit.checkpoint is not None,
            metrics=_finite_ones(commit.metrics),
        )


def _finite_ones(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: finite(value) for name, value in numbers.items()}


logger = logging.getLogger(__name__)

FLUSH_SECONDS: Final = 5.0
MOST_RECORDS: Final = 1000  # of a file, which is rewritten repeatedly; then a new one begins
DEAD_SECONDS: Final = 600.0  # after which an incomplete file has no writer: a call takes no longer
HELD_SECONDS: Final = 30.0  # the longest that anything waits for the history, if the store is unavailable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Waiter:
    """A function to call once the history is written. until: the time at which it is called in any case. complete: call
    it after all callbacks have handled the end of training.
    """

    until: float
    callback: Callable[[], None]
    complete: bool


class HistoryKeeper(History):
    """The writer of the job's history on the root; on other workers, the keeper of records that the next root may need.
    tell: sends a message to the coordinator, from any thread. turns: makes the thread.
    """

    def __init__(
        self,
        files: HistoryFiles,
        rates: Rates,
        tell: Callable[[Message], None],
        followers: Followers,
        turns: MakeTurns = TurnThread,
    ) -> None:
        self._files, self._tell, self._followers = files, tell, followers
        self._buffer = HistoryBuffer(rates)
        self._lock = threading.Lock()
        self._term: tuple[int, int] | None = None  # origin and epoch since which this worker is the root
        self._informed = False  # in this term the others have sent what they know
        self._file: HistoryFile | None = None  # in this term
        self._records: list[Record] = []  # in that file
        self._waiting: list[_Waiter] = []
        self._closed = self._troubled = False
        self._turns = turns(self._turn, FLUSH_SECONDS, "history")

    # in the engine's thread

    def mark(self, seconds: float, rate: float | None) -> HistoryMark:
        with self._lock:
            attempt, written = self._buffer.attempt, self._buffer.written
        return HistoryMark(attempt=attempt, written=written, at=time.time(), seconds=seconds, rate=rate)

    def committed(self, step: int, commit: Commit) -> None:
        with self._lock:
            self._buffer.committed(step, commit)
        if commit.checkpoint is not None:
            self._hurry()  # the steps before a checkpoint should be in the history when the job goes back to it

    def take_role(self, plan: Plan, leads: bool) -> None:
        with self._lock:
            self._buffer.obey(plan)
            if leads and self._term is not None and self._term[0] == plan.origin:
                return
            self._hurry()  # to release waiters
            self._term, self._informed, self._file = (plan.origin, plan.epoch) if leads else None, False, None
            if not leads:
                self._followers.lead(False)

    def informed(self) -> None:
        with self._lock:
            self._informed = True
        self._hurry()

    def unwritten(self) -> list[Commits]:
        with self._lock:
            return self._buffer.unwritten()

    def heard(self, commits: Commits) -> None:
        with self._lock:
            self._buffer.heard(commits)

    # in the worker's thread

    def happened(self, message: HistoryEvents) -> None:
        with self._lock:
            self._buffer.happened(message)

    def when_written(self, callback: Callable[[], None], *, complete: bool = False) -> None:
        """Call a function in the writing thread once all commits and events known now are written, or after
        HELD_SECONDS. If this worker is not the root, or is closed, call it at once. Any thread may call this.

        complete: training is complete; wait until the callbacks have handled its end, too.
        """
        with self._lock:
            waits = self._term is not None and not self._closed
            if waits:
                until = time.monotonic() + HELD_SECONDS
                self._waiting.append(_Waiter(until=until, callback=callback, complete=complete))
        if waits:
            self._turns.wake()
        else:
            callback()

    def announce_end(self, logger_seconds: float) -> None:
        """Report which followers the worker waits for at its end, if any. logger_seconds: the longest wait."""
        self._followers.announce_end(logger_seconds)

    def close(self, seconds: float, logger_seconds: float = 0.0) -> None:
        """Write the remaining records. seconds: the longest wait. logger_seconds: the longest wait for followers after
        that.
        """
        with self._lock:
            self._closed = True
        self._turns.end()
        self._turns.join(seconds)
        self._followers.close(logger_seconds)

    def _hurry(self) -> None:
        if self._term is not None:
            self._turns.wake()

    # in the separate thread

    def _turn(self, last: bool) -> None:
        """Write the records that are due. last: write all records, as no turn follows."""
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
        """Write the records that are due; return the waiters whose records are written now, without those that arrive
        meanwhile.
        """
        with self._lock:
            term, due, waiting = self._term, self._informed or last, tuple(self._waiting)
        if term is None or not due:
            return ()  # the others' commits have to be written before the others may forget them
        if self._file is None:
            self._prepare(term)
        with self._lock:
            file = self._file
            if file is None or self._term != term:
                return ()
            pending, written, events = self._buffer.pending(file.attempt)
        if not pending:
            return waiting
        while pending:
            room = max(1, MOST_RECORDS - len(self._records))
            some, pending = pending[:room], pending[room:]
            self._files.write(file, [*self._records, *some])
            self._records += some
            self._troubled = False
            if len(self._records) >= MOST_RECORDS:
                file = self._begin_file(term, HistoryFile(file.attempt, file.epoch, file.number + 1))
        with self._lock:
            if self._term == term:
                self._buffer.wrote(written, events)
        self._followers.wake()
        for source, number in events.items():
            self._tell(HistoryKept(source=source, number=number))
        return waiting

    def _prepare(self, term: tuple[int, int]) -> None:
        """Determine the attempt's number from the history, begin a file, and let the followers start."""
        self._files.remove_partial(older=DEAD_SECONDS)
        files = self._files.all()
        written = self._files.read(files[-1]) if files else ()
        with self._lock:
            newest = max([self._buffer.newest_attempt, *(file.attempt for file in files)])
            attempt = self._buffer.attempt or (newest if self._buffer.knows(written) else newest + 1)
        taken = [file.number for file in files if (file.attempt, file.epoch) == (attempt, term[1])]
        self._begin_file(term, HistoryFile(attempt, term[1], max(taken, default=-1) + 1))
        with self._lock:
            if self._term == term:
                self._followers.lead(True)

    def _begin_file(self, term: tuple[int, int], file: HistoryFile) -> HistoryFile:
        self._records = []
        with self._lock:
            if self._term == term:
                self._file, self._buffer.attempt = file, file.attempt
        return file

    def _release(self, everybody: bool, served: Sequence[_Waiter]) -> None:
        """Call the waiters whose records are written, or that have waited long enough. everybody: call all."""
        with self._lock:
            now, everybody = time.monotonic(), everybody or self._term is None
            ready = [
                one
                for one in self._waiting
                if everybody
                or one.until <= now
                or (one in served and (not one.complete or self._followers.complete(self._turns.wake)))
            ]
            self._waiting = [one for one in self._waiting if one not in ready]
        for one in ready:
            one.callback()

    def _trouble(self, message: str) -> None:
        """Report a failure once, until writing works again."""
        logger.warning("the history is not written: %s", message)
        if not self._troubled:
            self._troubled = True
            self._tell(WorkerWarning(reason="HistoryNotWritten", message=message[:MOST_TEXT]))
