"""Followers of the history, for loggers and callbacks: each has its own cursor and thread, so that none delays another.

Only the root's followers run. Each cursor is saved with the history, so the followers of a new root continue from it. A
callback's cursor includes the callback's state at the cursor's position. If the root is lost, the new root repeats
the calls after the saved cursor: at most AT_ONCE calls of a callback, unless saving had failed.
"""

import hashlib
import logging
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, Final, Self

import msgspec

from bamboo_core.control.protocol import MOST_TEXT, Message, WorkerFailed, WorkerWarning
from bamboo_core.history.files import HistoryFile, HistoryFiles
from bamboo_core.history.merge import merged
from bamboo_core.history.records import EvaluationRecord, EventRecord, HistoryError, Record, StepRecord
from bamboo_core.storage.bounded import StorageError
from bamboo_core.storage.url import parse_url
from bamboo_trainer.callbacks import Callback, MakeCallback
from bamboo_trainer.loggers import Logger, LoggerFacts, MakeLogger
from bamboo_trainer.tasks.task_errors import describe

AGAIN_SECONDS: Final = 10.0  # after a failure
AT_ONCE: Final = 10  # records; after them the callback's state is saved
MOST_KEPT: Final = 16  # states of a callback at checkpoints
MOST_STATE: Final = 64 * 1024  # bytes of a callback's state, as JSON
NOTHING: Final = (0, -1)  # before the first record of any kind
DISRUPTIONS: Final = frozenset(
    {"NoticeReceived", "WorkerLost", "WorkerEnded", "WorkerLeft", "Takeover", "Restoring", "Restored"}
)
_SAVED: Final = re.compile(r"the state of step (\d+) is saved")  # of CheckpointSaved

logger = logging.getLogger(__name__)


class TurnThread:
    """A thread that calls a function ("turn") after each `wake`, at least every `seconds`, and once more at the end;
    the argument says whether this turn is the last one. The first `wake` starts the thread.

    A turn may serve several wakes. name: the thread's name. warn: called with the text of a failed turn's error, unless
    the turn before has failed, too.
    """

    def __init__(self, turn: Callable[[bool], None], seconds: float, name: str, warn: Callable[[str], None]) -> None:
        self._turn, self._seconds, self._warn = turn, seconds, warn
        self._due = threading.Event()
        self._ended = self._fails = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def wake(self) -> None:
        """Let the thread call the next turn now."""
        self._due.set()
        if self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        """Let the thread call its last turn now. A thread that was never woken calls none."""
        self._ended = True
        self._due.set()

    def join(self, seconds: float) -> None:
        """Wait for the last turn to end. seconds: the longest wait."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def take(self, *, last: bool) -> None:
        """Call a turn. Log its error, and pass it to `warn` unless the turn before failed, too."""
        try:
            self._turn(last)
        except Exception as error:  # whatever a logger raises; a thread that ends would leave others waiting
            known = isinstance(error, StorageError | HistoryError)
            text = str(error) if known else f"{type(error).__name__}: {error}"
            logger.warning("%s fails: %s", self._thread.name, text, exc_info=None if known else error)
            if not self._fails:
                self._warn(text[:MOST_TEXT])
            self._fails = True
        else:
            self._fails = False

    def _run(self) -> None:
        last = False
        while not last:
            self._due.wait(self._seconds)
            self._due.clear()
            last = self._ended
            self.take(last=last)


MakeTurns = Callable[[Callable[[bool], None], float, str, Callable[[str], None]], TurnThread]


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """The position in the history up to which a logger or callback has received the records.

    given: (attempt, step) of the newest step, evaluation and call of `on_end`, and (0, number) of each source's newest
    event. A callback's cursor also has its state, its states at checkpoints by step (`at`), and whether it failed and
    is not called any more in this attempt (`off`).
    """

    given: dict[str, tuple[int, int]] = {}
    state: Any = None
    at: dict[int, Any] = {}
    off: bool = False

    @property
    def step(self) -> int:
        return self.given.get("step", (0, 0))[1]

    @property
    def attempt(self) -> int:
        return max(1, *(self.given.get(kind, NOTHING)[0] for kind in ("step", "evaluation")))

    def has(self, record: Record) -> bool:
        kind, place = _place(record)
        return place <= self.given.get(kind, NOTHING)

    def after(self, records: Sequence[Record]) -> Self:
        given = dict(self.given)
        for kind, place in map(_place, records):
            given[kind] = max(place, given.get(kind, NOTHING))
        return msgspec.structs.replace(self, given=given)


def _place(record: Record) -> tuple[str, tuple[int, int]]:
    """Return a record's key in `Cursor.given`, and its value there."""
    if isinstance(record, EventRecord):
        return f"events {record.source}", (0, record.number)
    return "step" if isinstance(record, StepRecord) else "evaluation", (record.attempt, record.step)


class SavedByAnother(Exception):
    """Raised if the saved cursor is ahead: another root saved it, and this worker does not know of that root yet."""


class HistoryFollower(ABC):
    """A reader of the history that gives one logger or callback each record after the saved cursor, in order. make:
    creates the logger or callback. tell: sends a message to the coordinator. turns: makes the thread.
    """

    kind: ClassVar[str]
    reason: ClassVar[str]  # of the warning that it fails
    at_once: ClassVar[int]  # records between two saves of the cursor

    def __init__(
        self,
        name: str,
        make: Callable[[LoggerFacts], Any],
        facts: LoggerFacts,
        files: HistoryFiles,
        tell: Callable[[Message], None],
        turns: MakeTurns,
    ) -> None:
        self.who, self._saved = f"the {self.kind} {name}", f"{self.kind}-{name}.json"
        self._make, self._facts, self._files, self._tell = make, facts, files, tell
        self.leads = False
        self.whole = False  # everything was given, and the logger or callback is closed
        self._wakes = self._followed = 0  # the last wake whose records were given
        self._ended = -1  # the last one with the end, too
        self._over: Callable[[], None] | None = None  # set when training is complete; called after `end`
        self._cursor: Cursor | None = None  # once it is read
        self._file: HistoryFile | None = None  # the newest that was read
        self.turns = turns(self._turn, AGAIN_SECONDS, f"{self.kind}-{name}", self._warn)

    @abstractmethod
    def write(self, records: Sequence[Record], cursor: Cursor) -> Cursor:
        """Give these records to the logger or callback; return the cursor after them."""

    def end(self, cursor: Cursor) -> Cursor:
        """Handle the end of training; return the cursor after that."""
        return cursor

    @abstractmethod
    def close(self) -> None:
        """Close the logger or callback; `write` makes another one."""

    def lead(self, leads: bool) -> None:
        """Follow the history if this worker is the root, else stop: two loggers must not write into the same run."""
        if leads or self.leads:
            self.leads, self._over = leads, None
            self.wake()

    def wake(self) -> None:
        """Let the thread give the history's new records to the logger or callback."""
        self._wakes += 1
        self.turns.wake()

    def complete(self, over: Callable[[], None]) -> bool:
        """Return whether this follower has handled the end of training; if not, call `over` once it has."""
        if self._ended == self._wakes:
            return True
        self._over = over
        self.turns.wake()
        return False

    def _turn(self, last: bool) -> None:
        wakes, leads, over = self._wakes, self.leads, self._over
        try:
            if leads and (over or wakes != self._followed):
                self._follow(complete=over is not None)
                self._followed = wakes
        except SavedByAnother:
            leads = False
            self.turns.wake()
        finally:
            if last or not leads:
                self._cursor = self._file = None
                self.close()
        self.whole = last
        if leads and over:
            self._ended, self._over = wakes, None
            over()

    def _follow(self, *, complete: bool) -> None:
        """Pass the records after the cursor to `write`; save the cursor. complete: training is complete; call `end`,
        too. Raises SavedByAnother; the logger's errors, StorageError and HistoryError, after which a retry is safe.
        """
        cursor = self._cursor = self._cursor or self._stored()
        files = [file for file in self._files.all() if self._file is None or file >= self._file]
        records = merged(record for file in files for record in self._files.read(file))
        new = [record for record in records if not cursor.has(record)]
        for start in range(0, len(new), self.at_once):
            cursor = self._save(self.write(new[start : start + self.at_once], cursor))
        if complete:
            self._save(self.end(cursor))
        elif not new:
            self._save(cursor)  # saving it may have failed before
        self._file = max(files, default=None)

    def _stored(self) -> Cursor:
        data = self._files.read_bytes(self._saved)
        return msgspec.json.decode(data, type=Cursor) if data else Cursor()

    def _save(self, cursor: Cursor) -> Cursor:
        """Set the cursor and save it; it stays set here even if saving fails. Raises SavedByAnother, StorageError."""
        self._cursor = cursor
        if any(place > cursor.given.get(kind, NOTHING) for kind, place in self._stored().given.items()):
            raise SavedByAnother
        self._files.write_bytes(self._saved, msgspec.json.encode(cursor))
        return cursor

    def _warn(self, text: str) -> None:
        self._tell(WorkerWarning(reason=self.reason, message=f"{self.who}: {text}"[:MOST_TEXT]))


class LoggerFollower(HistoryFollower):
    """The follower that writes records to a logger, which it creates again after a failure."""

    kind, reason, at_once = "logger", "LoggerFailed", 20_000
    _logger: Logger | None = None

    def write(self, records: Sequence[Record], cursor: Cursor) -> Cursor:
        own, self._logger = self._logger or self._make(self._facts), None
        own.write(records)
        self._logger = own
        return cursor.after(records)

    def close(self) -> None:
        own, self._logger = self._logger, None
        if own is not None:
            own.close()

    def complete(self, over: Callable[[], None]) -> bool:
        return True  # training does not wait for loggers


class CallbackFollower(HistoryFollower):
    """The follower that calls a callback for steps, evaluations, checkpoints, disruptions and the end of training."""

    kind, reason, at_once = "callback", "CallbackFailed", AT_ONCE
    _callback: Callback | None = None

    def write(self, records: Sequence[Record], cursor: Cursor) -> Cursor:
        for record in records:
            cursor = self._called(record, self._begun_anew(record, cursor).after([record]))
            if isinstance(record, StepRecord) and record.checkpoint and not cursor.off:
                cursor = self._kept(cursor)
                at = sorted({**cursor.at, record.step: cursor.state}.items())[-MOST_KEPT:]
                cursor = msgspec.structs.replace(cursor, at=dict(at))
        return self._kept(cursor)

    def end(self, cursor: Cursor) -> Cursor:
        steps = cursor.given.get("step", (0, 0))
        if cursor.given.get("end", NOTHING) >= steps:
            return cursor
        cursor = msgspec.structs.replace(cursor, given={**cursor.given, "end": steps})
        return self._kept(self._call("on_end", cursor.step, f"after step {cursor.step}", cursor))

    def close(self) -> None:
        self._callback = None  # the next one is made with the saved state

    def _begun_anew(self, record: Record, cursor: Cursor) -> Cursor:
        """Return the cursor to use for a record. The first step or evaluation of a new attempt resets `off`; if the
        attempt repeats steps, it also restores the callback's state at the newest checkpoint before them, or None.
        """
        if isinstance(record, EventRecord) or record.attempt <= cursor.attempt:
            return cursor
        first = record.step if isinstance(record, StepRecord) else record.step + 1
        cursor = msgspec.structs.replace(cursor, off=False)
        if cursor.step < first:  # no step that it was called for is repeated
            return cursor
        self._callback = None
        known = {step: state for step, state in cursor.at.items() if step < first}
        return msgspec.structs.replace(cursor, state=known[max(known)] if known else None, at=known)

    def _called(self, record: Record, cursor: Cursor) -> Cursor:
        match record:
            case StepRecord(step=step):
                return self._call("on_step", record, f"of step {step}", cursor)
            case EvaluationRecord(step=step):
                return self._call("on_evaluation", record, f"of the state after step {step}", cursor)
            case EventRecord(reason="CheckpointSaved", message=message) if saved := _SAVED.search(message):
                return self._call("on_checkpoint", int(saved[1]), f"of step {saved[1]}", cursor)
            case EventRecord(reason=reason) if reason in DISRUPTIONS:
                return self._call("on_disruption", record, f"of {reason} after step {cursor.step}", cursor)
        return cursor

    def _call(self, method: str, argument: object, when: str, cursor: Cursor) -> Cursor:
        """Call a method unless the cursor is `off`; return the cursor, `off` after an error. when: text for reports."""
        if cursor.off:
            return cursor
        try:
            if self._callback is None:
                made = self._make(self._facts)
                if not isinstance(made, Callback):
                    raise TypeError(f"made {type(made).__name__}, expected a bamboo_trainer.callbacks.Callback")
                if cursor.state is not None:
                    made.load_state_dict(deepcopy(cursor.state))  # the copy belongs to it from now on
                self._callback = made
            getattr(self._callback, method)(argument)
        except BaseException as error:  # in this thread no signal raises anything
            return self._failed(error, f"in {method}, {when},", cursor)
        return cursor

    def _kept(self, cursor: Cursor) -> Cursor:
        """Return the cursor with the callback's current state; set to `off` if the callback gives no valid state."""
        if self._callback is None:
            return cursor
        try:
            data = msgspec.json.encode(self._callback.state_dict())
            if len(data) > MOST_STATE:
                raise ValueError(f"it keeps {len(data)} bytes, at most {MOST_STATE} are accepted")
            return msgspec.structs.replace(cursor, state=msgspec.json.decode(data))
        except BaseException as error:  # in this thread no signal raises anything
            return self._failed(error, f"in state_dict, after step {cursor.step},", cursor)

    def _failed(self, error: BaseException, where: str, cursor: Cursor) -> Cursor:
        """Report an error of the callback, which ends the job if `fails_job` is True; return a cursor set to `off`."""
        text = f"{self.who}, {where} raised {describe(error)}"
        logger.warning("%s", text, exc_info=error)
        if getattr(self._callback or self._make, "fails_job", False):
            self._tell(WorkerFailed(reason="CallbackFailed", message=text[:MOST_TEXT]))
        else:
            text = f"{text[: MOST_TEXT // 2]}; it is not called any more"
            self._tell(WorkerWarning(reason="CallbackFailed", message=text))
        self._callback = None
        return msgspec.structs.replace(cursor, off=True)


def facts_of(job: str, url: str) -> LoggerFacts:
    parsed = parse_url(url, "the URL of a history")
    run = hashlib.blake2b(f"{job} {parsed.path}".encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return LoggerFacts(job=job, run=run, folder=parsed.path if parsed.protocol == "file" else "")


def followers_of(
    loggers: Mapping[str, MakeLogger],
    callbacks: Mapping[str, MakeCallback],
    facts: LoggerFacts,
    files: HistoryFiles,
    tell: Callable[[Message], None],
    turns: MakeTurns = TurnThread,
) -> list[HistoryFollower]:
    """Return a follower for each logger and callback. loggers, callbacks: functions that make them, by name."""
    common = (facts, files, tell, turns)
    written = [LoggerFollower(name, make, *common) for name, make in loggers.items()]
    return [*written, *(CallbackFollower(name, make, *common) for name, make in callbacks.items())]
