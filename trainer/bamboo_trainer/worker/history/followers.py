"""Followers of the history: loggers and callbacks, each with a cursor and a thread of its own, so that it holds up no
other.

Only the root's followers run. The cursor is saved with the history, so the followers of a new root continue from it.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from bamboo_core.control.protocol import LOGGERS_AWAITED, MOST_TEXT, Message, WorkerWarning
from bamboo_core.history.files import HistoryFile, HistoryFiles
from bamboo_core.history.merge import merged
from bamboo_core.history.records import Record
from bamboo_core.storage.url import parse_url
from bamboo_trainer.callbacks import MakeCallback
from bamboo_trainer.loggers.interface import Logger, LoggerFacts, MakeLogger
from bamboo_trainer.worker.history.callback_calls import CallbackCalls
from bamboo_trainer.worker.history.cursor import Cursor
from bamboo_trainer.worker.history.turns import MakeTurns, TurnThread

logger = logging.getLogger(__name__)

AGAIN_SECONDS: Final = 10.0  # after a failure
SLOW_SECONDS: Final = 60.0  # in which a recipient should take its records


def facts_of(job: str, url: str) -> LoggerFacts:
    parsed = parse_url(url, "the URL of a history")
    run = hashlib.blake2b(f"{job} {parsed.path}".encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return LoggerFacts(job=job, run=run, folder=parsed.path if parsed.protocol == "file" else "")


class Recipient(Protocol):
    """A receiver of the records. who: its name in messages. file: of its cursor, in the history's folder.

    reason: of a warning that it fails. kind: the file's type. at_once: records between two saves of the cursor.
    """

    who: str
    file: str
    reason: str
    kind: type[Any]
    at_once: int

    def write(self, records: Sequence[Record], before: Any) -> Any:
        """Take these records; return the cursor after them."""

    def end(self, before: Any) -> Any:
        """Note that training is complete, and that all records before were given."""

    def close(self) -> None:
        """Close until the next write: this worker is the root no longer, or ends."""


class LoggerRecipient:
    """A logger, which is created again after a failure."""

    kind = Cursor
    at_once = 20_000

    def __init__(self, name: str, make: MakeLogger, facts: LoggerFacts) -> None:
        self.who, self.file, self.reason = f"the logger {name}", f"logger-{name}.json", "LoggerFailed"
        self._make, self._facts = make, facts
        self._logger: Logger | None = None

    def write(self, records: Sequence[Record], before: Cursor) -> Cursor:
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
    """Gives one recipient the records of a history that it lacks, each once and in order."""

    def __init__(
        self,
        recipient: Recipient,
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
        self._cursor: Cursor | None = None  # once that is read
        self._unsaved = False  # the cursor
        self._file: HistoryFile | None = None  # the newest that was read
        self._since: float | None = None  # when the turn in progress began
        self._lock = threading.Lock()
        self._turns = turns(self._turn, AGAIN_SECONDS, recipient.file.removesuffix(".json"))

    def lead(self, leads: bool) -> None:
        """Follow the history while this worker is the root: two loggers must not write into the same run."""
        if leads or self.leads:
            with self._lock:
                self.leads, self.whole, self._ended = leads, False, None
            self.wake()

    def wake(self) -> None:
        """Note that the history has new records."""
        since = self._since
        if since is not None and time.monotonic() > since + SLOW_SECONDS:
            self._trouble(f"it has not answered for {SLOW_SECONDS:g} s")
        with self._lock:
            self._behind, self._knows_end = True, False
        self._turns.wake()

    def complete(self, ended: Callable[[], None]) -> bool:
        """Return whether the recipient knows that training is complete; otherwise call `ended` when it does."""
        with self._lock:
            if self._knows_end:
                return True
            self._ended = ended
        self._turns.wake()
        return False

    def end(self) -> None:
        self._turns.end()

    def join(self, seconds: float) -> None:
        self._turns.join(seconds)

    # in the thread

    def _turn(self, last: bool) -> None:
        with self._lock:
            leads, ended = self.leads, self._ended
            due, self._behind = leads and (self._behind or ended is not None), False
        self._since = time.monotonic()
        done = not due or self._succeeds(lambda: self._follow(complete=ended is not None))
        if last or not leads:
            self._cursor = self._file = None
            self.whole = self._succeeds(self.recipient.close) and done
        self._since = None
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
        """Give the records that it lacks. Raises the recipient's errors, and StorageError; can be repeated then."""
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
        elif self._unsaved:
            self._save(self._cursor)
        self._file, self._troubled = max(files, default=None), False

    def _save(self, now: Cursor) -> None:
        """Set the cursor, known here even if it cannot be saved."""
        self._cursor, self._unsaved = now, True
        self._files.write_bytes(self.recipient.file, msgspec.json.encode(now))
        self._unsaved = False

    def _trouble(self, message: str) -> None:
        """Report the trouble once, until it works again."""
        logger.warning("%s fails: %s", self.recipient.who, message)
        if not self._troubled:
            self._troubled = True
            text = f"{self.recipient.who}: {message}"
            self._tell(WorkerWarning(reason=self.recipient.reason, message=text[:MOST_TEXT]))


class Followers:
    """The followers of the job's history. loggers, callbacks: by name. tell: sends to the coordinator. turns: makes the
    callers of their turns.
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
        """Report that the end waits for followers, and for how long at most."""
        if names := [one.recipient.who for one in self._all if one.leads]:
            text = f"waiting up to {seconds:g} s for {', '.join(names)} to take all of the history"
            self._tell(WorkerWarning(reason=LOGGERS_AWAITED, message=text[:MOST_TEXT]))

    def close(self, seconds: float) -> None:
        """Close at the worker's end, giving the remaining records if that takes no longer; report what is missing."""
        until = time.monotonic() + seconds
        for one in self._all:
            one.end()
        for one in self._all:
            one.join(max(0.0, until - time.monotonic()))
            if one.leads and not one.whole:
                text = f"{one.recipient.who} has not finished, and may lack the last steps"
                if one in self._loggers:
                    text += "; `bamboo history --to` writes the history into it"
                logger.warning("%s", text)
                self._tell(WorkerWarning(reason="LoggerIncomplete", message=text[:MOST_TEXT]))
