"""The keeper of the job's history: the root writes it, and every worker keeps the records that a next root would need.

A root writes all commits that any worker knows, except the ones known to be in the history; readers merge the records
of several roots. A separate thread writes, so no step waits for the store; the job's end waits for a limited time only.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple

import msgspec

from bamboo_core.control.protocol import LOGGERS_AWAITED, MOST_TEXT, HistoryEvents, HistoryKept, Message, WorkerWarning
from bamboo_core.history.files import HistoryFile, HistoryFiles
from bamboo_core.history.records import EvaluationRecord, EventRecord, Record, StepRecord
from bamboo_core.planning.plan import Plan
from bamboo_trainer.commit.ports import History
from bamboo_trainer.frames import Commit, Commits, CommonState, HistoryMark
from bamboo_trainer.tasks.evaluation import finite
from bamboo_trainer.worker.followers import HistoryFollower, MakeTurns, TurnThread

MOST_KEPT: Final = 10_000  # commits, and as many events; beyond that, the oldest are dropped
SENT_AT_ONCE: Final = 1000  # commits, in one frame
FLUSH_SECONDS: Final = 5.0
MOST_RECORDS: Final = 1000  # of a file, which is rewritten repeatedly; then a new one begins
DEAD_SECONDS: Final = 600.0  # after which an incomplete file has no writer: a call takes no longer
HELD_SECONDS: Final = 30.0  # the longest that anything waits for the history, if the store is unavailable


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The amount of data in a step. batch: samples per step. tokens: tokens per sample; None if unknown."""

    batch: int
    tokens: int | None = None


def records_of(done: int, commit: Commit, rates: Rates, attempt: int) -> Iterator[Record]:
    """Yield a commit's records; none if it has no mark. done: steps committed before. attempt: if the mark has none."""
    if (mark := commit.history) is None:
        return
    attempt = mark.attempt or attempt
    if commit.evaluation:
        yield EvaluationRecord(attempt=attempt, step=done, time=mark.at, metrics=_finite_ones(commit.evaluation))
    if not commit.microbatches:
        return  # the job is over; this was the evaluation of its last state
    step, seconds = done + 1, mark.seconds or None
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


@dataclass(slots=True, eq=False)
class _Term:
    """The time in which this worker is the root. epoch: the epoch of its first plan. informed: the other workers have
    sent the commits that they know. records: the records in the file that is being written.
    """

    epoch: int
    informed: bool = False
    file: HistoryFile | None = None
    records: list[Record] = field(default_factory=list)


class _Waiter(NamedTuple):
    """A function to call once the history is written. until: when to call it in any case, in time.monotonic() seconds.
    complete: call it only after all callbacks have handled the end of training.
    """

    until: float
    callback: Callable[[], None]
    complete: bool


class HistoryKeeper(History):
    """The keeper of the newest commits and events that are not in the history yet, so that no step is lost with a root;
    on the root, the writer of the history. tell: sends a message to the coordinator, from any thread. turns: makes the
    thread.
    """

    def __init__(
        self,
        files: HistoryFiles,
        rates: Rates,
        tell: Callable[[Message], None],
        followers: Sequence[HistoryFollower],
        turns: MakeTurns = TurnThread,
    ) -> None:
        self._files, self._rates, self._tell, self._followers = files, rates, tell, followers
        self._lock = threading.Lock()
        self._commits: dict[int, Commit] = {}  # by the number of steps before
        self._events: dict[tuple[str, int], EventRecord] = {}  # by source and number
        self._written = 0  # commits before this number are in the history; the root sends it with each commit
        self._attempt = 0  # of the job; 0: unknown
        self._origin = self._first = 0  # of the plan; the step with which the attempt began
        self._term: _Term | None = None  # while this worker is the root
        self._waiting: list[_Waiter] = []
        self._turns = turns(self._turn, FLUSH_SECONDS, "history", partial(self._warn, "HistoryNotWritten"))

    # in the engine's thread

    def mark(self, seconds: float, rate: float | None) -> HistoryMark:
        with self._lock:
            attempt, written = self._attempt, self._written
        return HistoryMark(attempt=attempt, written=written, at=time.time(), seconds=seconds, rate=rate)

    def committed(self, step: int, commit: Commit) -> None:
        """Keep a commit, and forget the commits that its mark reports as written."""
        if commit.history is not None:
            with self._lock:
                self._attempt = commit.history.attempt or self._attempt
                self._forget(commit.history.written)
            self.heard([(step, commit)])
        if commit.checkpoint is not None:
            self._hurry()  # the steps before a checkpoint should be in the history when the job goes back to it

    def heard(self, commits: Commits) -> None:
        """Keep commits that the history may lack; beyond MOST_KEPT, drop the oldest."""
        with self._lock:
            for step, commit in commits:
                if commit.history is not None and step >= self._written:
                    self._commits.setdefault(step, msgspec.structs.replace(commit, common=CommonState()))
            while len(self._commits) > MOST_KEPT:
                del self._commits[min(self._commits)]

    def unwritten(self) -> list[Commits]:
        with self._lock:
            commits = sorted(self._commits.items())
        return [commits[at : at + SENT_AT_ONCE] for at in range(0, len(commits), SENT_AT_ONCE)]

    def take_role(self, plan: Plan, leads: bool) -> None:
        """Note whether this worker is the root. If the plan's states have a new origin, forget the commits from the
        plan's first step on.
        """
        with self._lock:
            goes_on = plan.origin == self._origin
            if not goes_on:
                self._origin, self._written = plan.origin, min(self._written, plan.first_step)
                self._commits = {step: commit for step, commit in self._commits.items() if step < plan.first_step}
                if not plan.moved:
                    self._first, self._attempt = plan.first_step, 0
            if leads and goes_on and self._term is not None:
                return
            self._hurry()  # to release waiters
            self._term = _Term(plan.epoch) if leads else None
            if not leads:
                for follower in self._followers:
                    follower.lead(False)

    def informed(self) -> None:
        with self._lock:
            if self._term is not None:
                self._term.informed = True
        self._hurry()

    # in the worker's thread

    def happened(self, message: HistoryEvents) -> None:
        """Keep events of the coordinator; beyond MOST_KEPT, drop the oldest."""
        with self._lock:
            for event in message.events:
                fields = msgspec.structs.asdict(event)
                self._events[message.source, event.number] = EventRecord(attempt=0, source=message.source, **fields)
            while len(self._events) > MOST_KEPT:
                del self._events[next(iter(self._events))]

    def when_written(self, callback: Callable[[], None], *, complete: bool = False) -> None:
        """Call a function in the writing thread once all commits and events known now are written, or HELD_SECONDS have
        passed, or this worker is no longer the root. If it is not the root now, call the function at once. Do not use
        this after `close`. complete: training is complete; wait until the callbacks have handled its end, too.
        """
        with self._lock:
            waits = self._term is not None
            if waits:
                self._waiting.append(_Waiter(time.monotonic() + HELD_SECONDS, callback, complete))
        if waits:
            self._turns.wake()
        else:
            callback()

    def announce_end(self, logger_seconds: float) -> None:
        """Report which followers the worker waits for at its end, if any. logger_seconds: the longest wait."""
        if names := [one.who for one in self._followers if one.leads]:
            text = f"waiting up to {logger_seconds:g} s for {', '.join(names)} to take all of the history"
            self._warn(LOGGERS_AWAITED, text)

    def close(self, seconds: float, logger_seconds: float = 0.0) -> None:
        """As the root, write the remaining records and give them to the followers. Close the followers; report the ones
        that have not finished. seconds: the longest wait for writing. logger_seconds: the longest for followers.
        """
        self._turns.end()
        self._turns.join(seconds)
        until = time.monotonic() + logger_seconds
        for one in self._followers:
            one.turns.end()
        for one in self._followers:
            one.turns.join(max(0.0, until - time.monotonic()))
            if one.leads and not one.whole:
                self._warn("LoggerIncomplete", f"{one.who} has not finished, and may lack the last steps")

    def _hurry(self) -> None:
        if self._term is not None:
            self._turns.wake()

    def _warn(self, reason: str, text: str) -> None:
        self._tell(WorkerWarning(reason=reason, message=text[:MOST_TEXT]))

    # in the separate thread

    def _turn(self, last: bool) -> None:
        """As the root, write the kept records if the other workers have sent theirs. Call the waiters whose records are
        written or whose time is over, or all if this worker is not the root. last: write and call all; no turn follows.
        """
        with self._lock:
            term, waiting, self._waiting = self._term, self._waiting, []
        written = False
        try:
            if term is not None and (term.informed or last):
                written = self._flush(term)  # not before the others have sent their commits, which they forget then
        finally:
            now, everybody = time.monotonic(), last or self._term is None
            left = [one for one in waiting if not (everybody or one.until <= now or (written and self._serves(one)))]
            with self._lock:
                self._waiting = [*left, *self._waiting]
            for one in waiting:
                if one not in left:
                    one.callback()

    def _serves(self, one: _Waiter) -> bool:
        """Return whether a waiter can be called. If it waits for callbacks, let them handle the end of training."""
        return not one.complete or not [f for f in self._followers if not f.complete(self._turns.wake)]

    def _flush(self, term: _Term) -> bool:
        """Write all kept commits and events, and wake the followers; return False if the term is over."""
        file = term.file or self._prepare(term)
        with self._lock:
            if self._term is not term:
                return False
            pending, written, events = self._pending(file.attempt)
        if not pending:
            return True
        while pending:
            if len(term.records) >= MOST_RECORDS:
                term.file = file = replace(file, number=file.number + 1)
                term.records = []
            room = MOST_RECORDS - len(term.records)
            some, pending = pending[:room], pending[room:]
            self._files.write(file, [*term.records, *some])
            term.records += some
        with self._lock:
            if self._term is term:
                self._forget(written)
                self._events = {key: one for key, one in self._events.items() if key[1] > events.get(key[0], 0)}
        for follower in self._followers:
            follower.wake()
        for source, number in events.items():
            self._tell(HistoryKept(source=source, number=number))
        return True

    def _prepare(self, term: _Term) -> HistoryFile:
        """Determine the attempt's number from the history, let the followers start, and return a new file."""
        self._files.remove_partial(older=DEAD_SECONDS)
        files = self._files.all()
        newest = self._files.read(files[-1]) if files else ()
        with self._lock:
            attempt = self._attempt_after(max((file.attempt for file in files), default=0), newest)
            taken = [file.number for file in files if (file.attempt, file.epoch) == (attempt, term.epoch)]
            term.file = HistoryFile(attempt, term.epoch, max(taken, default=-1) + 1)
            if self._term is term:
                self._attempt = attempt
                for follower in self._followers:
                    follower.lead(True)
        return term.file

    # with the lock

    def _forget(self, written: int) -> None:
        """Forget the commits before this number, which are in the history."""
        if written > self._written:
            self._written = written
            self._commits = {step: commit for step, commit in self._commits.items() if step >= written}

    def _attempt_after(self, newest: int, records: Sequence[Record]) -> int:
        """Return the number of the current attempt. If unknown, it is the newest attempt if the history's last file has
        a commit that this worker keeps, else a new one. newest: the history's newest attempt. records: of that file.
        """
        marks = {step: commit.history for step, commit in self._commits.items() if commit.history}
        newest = max([newest, *(mark.attempt for mark in marks.values())])
        times = {step + 1: mark.at for step, mark in marks.items() if step >= self._first}
        goes_on = any(times.get(one.step) == one.time for one in records if isinstance(one, StepRecord))
        return self._attempt or (newest if goes_on else newest + 1)

    def _pending(self, attempt: int) -> tuple[list[Record], int, dict[str, int]]:
        """Return all records to write, the number of steps up to their last commit (0 without commits), and the number
        of each source's last event. attempt: the current attempt.
        """
        records: list[Record] = []
        for step, commit in sorted(self._commits.items()):
            records += records_of(step, commit, self._rates, attempt if step >= self._first else max(1, attempt - 1))
        newest: dict[str, int] = {}
        for source, number in self._events:
            newest[source] = max(number, newest.get(source, 0))
        records += [msgspec.structs.replace(event, attempt=attempt) for event in self._events.values()]
        return records, max(self._commits, default=-1) + 1, newest
