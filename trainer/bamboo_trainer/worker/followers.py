"""Followers of the history: loggers and callbacks, each with its own cursor and thread, so that none delays others.

Only the root's followers run. The cursor is saved with the history, so the followers of a new root continue from it.

`CallbackCalls` calls a callback for the records of the history: each step, evaluation and event once, in order. The
callback's state is saved together with its cursor, so it counts each call once. A root that is lost may have made calls
that were not saved, at most AT_ONCE of them; these are repeated.
"""

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final, Self

import msgspec

from bamboo_core.control.protocol import LOGGERS_AWAITED, MOST_TEXT, Message, WorkerFailed, WorkerWarning
from bamboo_core.history.files import HistoryFile, HistoryFiles
from bamboo_core.history.merge import merged
from bamboo_core.history.records import EvaluationRecord, EventRecord, Record, StepRecord
from bamboo_core.storage.url import parse_url
from bamboo_trainer.callbacks import Callback, MakeCallback
from bamboo_trainer.loggers import Logger, LoggerFacts, MakeLogger
from bamboo_trainer.tasks.task_errors import describe

Turn = Callable[[bool], None]  # with whether it is the last one


class TurnThread:
    """A thread that calls a function ("turn") at each `wake`, and once more at the end. The first `wake` starts it.
    seconds: the longest time between two turns. name: of the thread.
    """

    def __init__(self, turn: Turn, seconds: float, name: str) -> None:
        self._turn, self._seconds = turn, seconds
        self._changed = threading.Condition()
        self._due = self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def wake(self) -> None:
        """Let the thread call the next turn now."""
        with self._changed:
            self._due = True
            self._changed.notify_all()
            if self._thread.ident is None:
                self._thread.start()

    def end(self) -> None:
        """Let the thread call its last turn now. A thread that was never woken calls none."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """Wait for the last turn to end. seconds: the longest wait."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        last = False
        while not last:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._ended, self._seconds)
                last, self._due = self._ended, False
            self._turn(last)


MakeTurns = Callable[[Turn, float, str], TurnThread]


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """The position in the history up to which a logger or a callback was given records.

    attempt, step: of the last step. evaluated: (attempt, step) of the last evaluation. events: the number of the last
    event, by source.
    """

    attempt: int = 0
    step: int = 0
    evaluated: tuple[int, int] = (0, -1)
    events: dict[str, int] = {}

    def has(self, record: Record) -> bool:
        match record:
            case StepRecord():
                return (record.attempt, record.step) <= (self.attempt, self.step)
            case EvaluationRecord():
                return (record.attempt, record.step) <= self.evaluated
        return record.number <= self.events.get(record.source, 0)

    def after(self, records: Sequence[Record]) -> Self:
        attempt, step, evaluated, events = self.attempt, self.step, self.evaluated, dict(self.events)
        for record in records:
            match record:
                case StepRecord():
                    attempt, step = max((attempt, step), (record.attempt, record.step))
                case EvaluationRecord():
                    evaluated = max(evaluated, (record.attempt, record.step))
                case EventRecord():
                    events[record.source] = max(record.number, events.get(record.source, 0))
        return msgspec.structs.replace(self, attempt=attempt, step=step, evaluated=evaluated, events=events)


logger = logging.getLogger(__name__)

AT_ONCE: Final = 10  # records; after them the callback's state is saved
MOST_KEPT: Final = 16  # states of a callback at checkpoints
MOST_STATE: Final = 64 * 1024  # bytes of a callback's state, as JSON
DISRUPTIONS: Final = frozenset(
    {"NoticeReceived", "WorkerLost", "WorkerEnded", "WorkerLeft", "Takeover", "Restoring", "Restored"}
)
_SAVED: Final = re.compile(r"the state of step (\d+) is saved")  # of CheckpointSaved


class Called(Cursor, frozen=True, kw_only=True):
    """A callback's cursor and its state.

    during: the attempt of the cursor. at: its state at checkpoints, by step. off: the attempt in which it failed, or 0.
    ended: `on_end` was called.
    """

    state: Any = None
    during: int = 0
    at: dict[int, Any] = msgspec.field(default_factory=dict)
    off: int = 0
    ended: bool = False

    @property
    def is_off(self) -> bool:
        return self.off > 0 and self.off == self.during


class CallbackCalls:
    """The recipient that calls a callback for each record. make: creates it from facts. tell: reports its failure."""

    kind = Called
    at_once = AT_ONCE

    def __init__(self, name: str, make: MakeCallback, facts: LoggerFacts, tell: Callable[[Message], None]) -> None:
        self.who, self.file, self.reason = f"the callback {name}", f"callback-{name}.json", "CallbackFailed"
        self._make, self._facts, self._tell = make, facts, tell
        self._callback: Callback | None = None
        self._doing = ""

    def write(self, records: Sequence[Record], before: Called) -> Called:
        """Call the callback for these records; return the cursor after them."""
        now = before
        for record in records:
            now = self._begun_anew(record, now)
            if not now.is_off:
                now = self._called(record, now)
            now = now.after([record])
        return now if now.is_off else self._kept(now)

    def end(self, before: Called) -> Called:
        """Call `on_end`, as training is complete; return the cursor after it."""
        if before.ended:
            return before
        now = msgspec.structs.replace(before, ended=True)
        if now.is_off:
            return now
        try:
            self._doing = f"in on_end, after step {now.step},"
            self._ready(now).on_end(now.step)
        except BaseException as error:  # in this thread no signal raises anything
            return self._failed(error, now)
        return self._kept(now)

    def close(self) -> None:
        """Drop the callback object: the next one is made with the saved state."""
        self._callback = None

    def _begun_anew(self, record: Record, before: Called) -> Called:
        """If the job has gone back to a checkpoint, restore the callback's state at that checkpoint, or at the newest
        one before it.
        """
        if not isinstance(record, StepRecord | EvaluationRecord) or record.attempt <= before.during:
            return before
        trains = isinstance(record, StepRecord)
        first = record.step if trains else record.step + 1
        before = msgspec.structs.replace(before, ended=before.ended and not trains)
        if not before.during or before.step < first:  # no step that it was called for is repeated
            return msgspec.structs.replace(before, during=record.attempt)
        known = {step: state for step, state in before.at.items() if step < first}
        state = known[max(known)] if known else None
        self._callback = None
        return msgspec.structs.replace(before, during=record.attempt, state=state, at=known)

    def _called(self, record: Record, now: Called) -> Called:
        try:
            self._call(record, now)
        except BaseException as error:  # in this thread no signal raises anything
            return self._failed(error, now)
        if not (isinstance(record, StepRecord) and record.checkpoint):
            return now
        now = self._kept(now)
        at = dict(sorted({**now.at, record.step: now.state}.items())[-MOST_KEPT:])
        return msgspec.structs.replace(now, at=at)

    def _call(self, record: Record, now: Called) -> None:
        match record:
            case StepRecord(step=step):
                self._doing = f"in on_step, of step {step},"
                self._ready(now).on_step(record)
            case EvaluationRecord(step=step):
                self._doing = f"in on_evaluation, of the state after step {step},"
                self._ready(now).on_evaluation(record)
            case EventRecord(reason="CheckpointSaved", message=message) if saved := _SAVED.search(message):
                self._doing = f"in on_checkpoint, of step {saved[1]},"
                self._ready(now).on_checkpoint(int(saved[1]))
            case EventRecord(reason=reason) if reason in DISRUPTIONS:
                self._doing = f"in on_disruption ({reason}), after step {now.step},"
                self._ready(now).on_disruption(record)

    def _ready(self, now: Called) -> Callback:
        if self._callback is None:
            made = self._make(self._facts)
            if not isinstance(made, Callback):
                raise TypeError(f"made {type(made).__name__}, expected a bamboo_trainer.callbacks.Callback")
            if now.state is not None:
                made.load_state_dict(deepcopy(now.state))  # the copy belongs to it from now on
            self._callback = made
        return self._callback

    def _kept(self, now: Called) -> Called:
        """Return the cursor with the callback's current state, or off if the callback cannot give a valid state."""
        if self._callback is None:
            return now
        self._doing = f"in state_dict, after step {now.step},"
        try:
            data = msgspec.json.encode(self._callback.state_dict())
            if len(data) > MOST_STATE:
                raise ValueError(f"it keeps {len(data)} bytes, at most {MOST_STATE} are accepted")
            return msgspec.structs.replace(now, state=msgspec.json.decode(data))
        except BaseException as error:  # in this thread no signal raises anything
            return self._failed(error, now)

    def _failed(self, error: BaseException, now: Called) -> Called:
        """Report an error of the callback, which ends the job if `fails_job`; return a cursor that is off."""
        fails_job = getattr(self._callback or self._make, "fails_job", False)
        text = f"{self.who}, {self._doing} raised {describe(error)}"
        logger.warning("%s", text, exc_info=error)
        if fails_job:
            self._tell(WorkerFailed(reason="CallbackFailed", message=text[:MOST_TEXT]))
        else:
            text = f"{text[: MOST_TEXT // 2]}; it is not called any more"
            self._tell(WorkerWarning(reason="CallbackFailed", message=text))
        self._callback = None
        return msgspec.structs.replace(now, off=max(1, now.during), during=max(1, now.during))


AGAIN_SECONDS: Final = 10.0  # after a failure


def facts_of(job: str, url: str) -> LoggerFacts:
    parsed = parse_url(url, "the URL of a history")
    run = hashlib.blake2b(f"{job} {parsed.path}".encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return LoggerFacts(job=job, run=run, folder=parsed.path if parsed.protocol == "file" else "")


class LoggerRecipient:
    """The recipient that writes records to a logger, which it creates again after a failure.

    Like `CallbackCalls` it has: who, its name in messages; file, of its cursor, in the history's folder; reason, of a
    warning that it fails; kind, the file's type; at_once, records between two saves of the cursor.
    """

    kind = Cursor
    at_once = 20_000

    def __init__(self, name: str, make: MakeLogger, facts: LoggerFacts) -> None:
        self.who, self.file, self.reason = f"the logger {name}", f"logger-{name}.json", "LoggerFailed"
        self._make, self._facts = make, facts
        self._logger: Logger | None = None

    def write(self, records: Sequence[Record], before: Cursor) -> Cursor:
        """Give the logger these records; return the cursor after them."""
        own, self._logger = self._logger or self._make(self._facts), None
        own.write(records)
        self._logger = own
        return before.after(records)

    def end(self, before: Cursor) -> Cursor:
        return before

    def close(self) -> None:
        own, self._logger = self._logger, None
        if own is not None:
            own.close()


class HistoryFollower:
    """A reader of the history that gives one recipient each record once, in order."""

    def __init__(
        self,
        recipient: LoggerRecipient | CallbackCalls,
        files: HistoryFiles,
        tell: Callable[[Message], None],
        turns: MakeTurns,
    ) -> None:
        self.recipient, self._files, self._tell = recipient, files, tell
        self.leads = self._behind = False  # behind: the history may have records that it was not given
        self._troubled = False
        self.whole = False  # the recipient has taken everything, and is closed
        self._ended: Callable[[], None] | None = None  # training is complete; called once the recipient knows
        self._knows_end = False
        self._cursor: Any = None  # the recipient's, once that is read
        self._file: HistoryFile | None = None  # the newest that was read
        self._lock = threading.Lock()
        self.turns = turns(self._turn, AGAIN_SECONDS, recipient.file.removesuffix(".json"))

    def lead(self, leads: bool) -> None:
        """Follow the history if this worker is the root, else stop: two loggers must not write into the same run."""
        if leads or self.leads:
            with self._lock:
                self.leads, self.whole, self._ended = leads, False, None
            self.wake()

    def wake(self) -> None:
        """Note that the history has new records."""
        with self._lock:
            self._behind, self._knows_end = True, False
        self.turns.wake()

    def complete(self, ended: Callable[[], None]) -> bool:
        """Return whether the recipient knows that training is complete; otherwise call `ended` when it does."""
        with self._lock:
            if self._knows_end:
                return True
            self._ended = ended
        self.turns.wake()
        return False

    # in the thread

    def _turn(self, last: bool) -> None:
        with self._lock:
            leads, ended = self.leads, self._ended
            due, self._behind = leads and (self._behind or ended is not None), False
        done = not due or self._succeeds(lambda: self._follow(complete=ended is not None))
        if last or not leads:
            self._cursor = self._file = None
            self.whole = self._succeeds(self.recipient.close) and done
        if not done:
            self._behind = True
        elif due and ended is not None:
            with self._lock:
                self._ended, self._knows_end = None, not self._behind
            ended()

    def _succeeds(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:  # whatever a logger raises
            self._trouble(f"{type(error).__name__}: {error}")
            return False
        return True

    def _follow(self, *, complete: bool) -> None:
        """Give the recipient the records after its cursor, and save the cursor. complete: training is complete; call
        its `end`, too. Raises the recipient's errors, and StorageError; the call can be repeated then.
        """
        if self._cursor is None:
            data = self._files.read_bytes(self.recipient.file)
            self._cursor = msgspec.json.decode(data, type=self.recipient.kind) if data else self.recipient.kind()
        files = [file for file in self._files.all() if self._file is None or file >= self._file]
        records = merged(record for file in files for record in self._files.read(file))
        new = [record for record in records if not self._cursor.has(record)]
        for start in range(0, len(new), self.recipient.at_once):
            self._save(self.recipient.write(new[start : start + self.recipient.at_once], self._cursor))
        if complete:
            self._save(self.recipient.end(self._cursor))
        elif not new:
            self._save(self._cursor)  # saving it may have failed before
        self._file, self._troubled = max(files, default=None), False

    def _save(self, now: Cursor) -> None:
        """Set the cursor and save it; it stays set here even if saving fails."""
        self._cursor = now
        self._files.write_bytes(self.recipient.file, msgspec.json.encode(now))

    def _trouble(self, message: str) -> None:
        """Report a failure once, until the recipient works again."""
        logger.warning("%s fails: %s", self.recipient.who, message)
        if not self._troubled:
            self._troubled = True
            text = f"{self.recipient.who}: {message}"
            self._tell(WorkerWarning(reason=self.recipient.reason, message=text[:MOST_TEXT]))


class Followers:
    """The followers of the job's history on this worker. loggers, callbacks: functions that make them, by name. tell:
    sends a message to the coordinator. turns: makes the threads.
    """

    def __init__(
        self,
        loggers: Mapping[str, MakeLogger],
        callbacks: Mapping[str, MakeCallback],
        facts: LoggerFacts,
        files: HistoryFiles,
        tell: Callable[[Message], None],
        turns: MakeTurns = TurnThread,
    ) -> None:
        self._tell = tell
        self._loggers = [
            HistoryFollower(LoggerRecipient(name, make, facts), files, tell, turns) for name, make in loggers.items()
        ]
        self._callbacks = [
            HistoryFollower(CallbackCalls(name, made, facts, tell), files, tell, turns)
            for name, made in callbacks.items()
        ]
        self._all = [*self._loggers, *self._callbacks]

    def lead(self, leads: bool) -> None:
        """Begin to follow the history, as the root's followers, or stop."""
        for one in self._all:
            one.lead(leads)

    def wake(self) -> None:
        """Note that the history has new records."""
        for one in self._all:
            one.wake()

    def complete(self, ended: Callable[[], None]) -> bool:
        """Return whether all callbacks know that training is complete; otherwise call `ended` when one of them does."""
        return not [one for one in self._callbacks if not one.complete(ended)]

    def announce_end(self, seconds: float) -> None:
        """Report that the worker waits for its followers at its end. seconds: the longest wait."""
        if names := [one.recipient.who for one in self._all if one.leads]:
            text = f"waiting up to {seconds:g} s for {', '.join(names)} to take all of the history"
            self._tell(WorkerWarning(reason=LOGGERS_AWAITED, message=text[:MOST_TEXT]))

    def close(self, seconds: float) -> None:
        """Give the followers the remaining records and close them, at the worker's end. Report followers that have not
        finished. seconds: the longest wait.
        """
        until = time.monotonic() + seconds
        for one in self._all:
            one.turns.end()
        for one in self._all:
            one.turns.join(max(0.0, until - time.monotonic()))
            if one.leads and not one.whole:
                text = f"{one.recipient.who} has not finished, and may lack the last steps"
                logger.warning("%s", text)
                self._tell(WorkerWarning(reason="LoggerIncomplete", message=text[:MOST_TEXT]))
