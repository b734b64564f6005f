"""Gives the history to loggers and callbacks, each in its own thread, which alone waits for it.

The position of each is saved beside the history, so that a new root's continues there.
"""

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from bamboo_core.control.protocol import LOGGERS_AWAITED, MOST_TEXT, Message, WorkerWarning
from bamboo_core.history.files import HistoryFiles
from bamboo_core.history.merge import merged
from bamboo_core.history.records import Record, StepRecord
from bamboo_core.storage.url import parse_url
from bamboo_trainer.callbacks import MakeCallback
from bamboo_trainer.loggers.interface import Logger, LoggerFacts, MakeLogger
from bamboo_trainer.worker.history.callback_calls import CallbackCalls
from bamboo_trainer.worker.history.reached import Reached, reached

logger = logging.getLogger(__name__)

MOST_WAITING: Final = 20_000  # records; a logger that is further behind misses the oldest
AGAIN_SECONDS: Final = 10.0  # after a failure
POLL_SECONDS: Final = 0.5  # while one waits for its predecessor
SLOW_SECONDS: Final = 60.0  # in which a logger should take its records


def facts_of(job: str, url: str) -> LoggerFacts:
    parsed = parse_url(url, "the URL of a history")
    run = hashlib.blake2b(f"{job} {parsed.path}".encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return LoggerFacts(job=job, run=run, folder=parsed.path if parsed.protocol == "file" else "")


class Recipient(Protocol):
    """A receiver of the records. who: its name in messages. file: of its position, beside the history.

    reason: of a warning that it fails. kind: the file's type. at_once: records between two saves of the position.
    """

    who: str
    file: str
    reason: str
    kind: type[Any]
    at_once: int

    def write(self, records: Sequence[Record], before: Any) -> Any:
        """Take these records; return the position after them."""

    def end(self, before: Any) -> Any:
        """Note that training is complete, and that all records before were given."""

    def close(self) -> None:
        """Close: no more records come from this worker."""


class LoggerRecipient:
    """A logger, which is made anew after a failure."""

    kind = Reached
    at_once = MOST_WAITING

    def __init__(self, name: str, make: MakeLogger, facts: LoggerFacts) -> None:
        self.who, self.file, self.reason = f"the logger {name}", f"logger-{name}.json", "LoggerFailed"
        self._make, self._facts = make, facts
        self._logger: Logger | None = None

    def write(self, records: Sequence[Record], before: Reached) -> Reached:
        own, self._logger = self._logger or self._make(self._facts), None
        own.write(records)
        self._logger = own
        return before.after(records)

    def end(self, before: Reached) -> Reached:
        return before

    def close(self) -> None:
        if self._logger is not None:
            self._logger.close()


class LoggingThreads:
    """loggers, callbacks: by name. tell: sends to the coordinator. They begin with `begin`."""

    def __init__(
        self,
        loggers: Mapping[str, MakeLogger],
        callbacks: Mapping[str, MakeCallback],
        facts: LoggerFacts,
        files: HistoryFiles,
        tell: Callable[[Message], None],
    ) -> None:
        self._loggers, self._callbacks, self._facts, self._files, self._tell = loggers, callbacks, facts, files, tell
        self._threads: list[_LoggingThread] = []  # while this worker is the root
        self._retired: dict[str, _LoggingThread] = {}  # by file: the last one that was told to leave

    def begin(self) -> None:
        """Begin as the root's readers, with records of the history that were not given yet."""
        if not self._threads:
            recipients: list[Recipient] = [
                LoggerRecipient(name, make, self._facts) for name, make in self._loggers.items()
            ]
            for name, called in self._callbacks.items():
                recipients.append(CallbackCalls(name, called, self._facts, self._tell))
            for recipient in recipients:
                before = self._retired.get(recipient.file)
                self._threads.append(_LoggingThread(recipient, self._files, self._tell, before))

    def retire(self) -> None:
        """Stop: another root's loggers continue, and two must not write into the same run."""
        for thread in self._threads:
            thread.retire()
            self._retired[thread.recipient.file] = thread
        self._threads = []

    def give(self, records: Sequence[Record]) -> None:
        """Give records that are in the history now."""
        for thread in self._threads:
            thread.give(records)

    def complete(self, done: Callable[[], None], seconds: float) -> None:
        """Tell the callbacks that training is complete, and call `done` after them, from any thread, or after that
        time.
        """
        threads = [thread for thread in self._threads if isinstance(thread.recipient, CallbackCalls)]
        countdown = _Countdown(len(threads), done, seconds)
        for thread in threads:
            thread.complete(countdown.one)

    def announce_end(self, seconds: float) -> None:
        """Report that the end waits for readers with records, and for how long at most."""
        if names := [thread.recipient.who for thread in self._threads]:
            text = f"waiting up to {seconds:g} s for {', '.join(names)} to take all of the history"
            self._tell(WorkerWarning(reason=LOGGERS_AWAITED, message=text[:MOST_TEXT]))

    def close(self, seconds: float) -> None:
        """Close at the worker's end, giving waiting records if that takes no longer, and report what is missing.
        Threads of an earlier time as the root may close within that time, too.
        """
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.end()
        for thread in self._retired.values():
            thread.join(max(0.0, until - time.monotonic()))
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            if missing := thread.missing():
                text = f"{thread.recipient.who} {missing}"
                if isinstance(thread.recipient, LoggerRecipient):
                    text += "; `bamboo history --to` writes the history into it"
                logger.warning("%s", text)
                self._tell(WorkerWarning(reason="LoggerIncomplete", message=text[:MOST_TEXT]))


class Delivery:
    """Gives one recipient the records of a history that it lacks, each once and in order.

    The position is saved after at most `at_once` records.
    """

    def __init__(self, recipient: Recipient, files: HistoryFiles) -> None:
        self.recipient, self._files = recipient, files
        self._reached: Reached | None = None  # once that is read
        self._unsaved = False  # the position is not saved
        self.behind = True  # it lacks records that are in the history

    def write(self, given: Sequence[Record], *, complete: bool) -> None:
        """Give the new ones of these records, and of the history if it is behind. complete: training is.

        Raises the recipient's errors, and StorageError; it can be called again then.
        """
        if self._reached is None:
            self._reached = reached(self._files.read_bytes(self.recipient.file), self.recipient.kind)
        if self.behind:
            given = merged([*self._files.read_all(), *given])
        new = [record for record in given if not self._reached.has(record)]
        for start in range(0, len(new), self.recipient.at_once):
            self._save(self.recipient.write(new[start : start + self.recipient.at_once], self._reached))
        if complete:
            self._save(self.recipient.end(self._reached))
        elif self._unsaved:
            self._save(self._reached)
        self.behind = False

    def has(self, record: Record) -> bool:
        return self._reached is not None and self._reached.has(record)

    def _save(self, now: Reached) -> None:
        """Set the position, known here even if it cannot be saved."""
        self._reached, self._unsaved = now, True
        self._files.write_bytes(self.recipient.file, msgspec.json.encode(now))
        self._unsaved = False


class _LoggingThread:
    """before: the thread that had that name, which must end before this one reads the position."""

    def __init__(
        self,
        recipient: Recipient,
        files: HistoryFiles,
        tell: Callable[[Message], None],
        before: "_LoggingThread | None",
    ) -> None:
        self.recipient, self._tell = recipient, tell
        self._delivery = Delivery(recipient, files)
        self._changed = threading.Condition()
        self._waiting: deque[Record] = deque(maxlen=MOST_WAITING)
        self._completed: list[Callable[[], None]] = []  # called after the recipient knows that training is complete
        self._ended = self._retired = self._troubled = False
        self._whole = False  # it has ended, and its recipient has taken and closed everything
        self._before = before
        self._thread = threading.Thread(target=self._run, name=recipient.file.removesuffix(".json"), daemon=True)
        self._thread.start()

    def missing(self) -> str:
        """Describe what it has not done, after its end or instead of it; "" if it has done all."""
        if self._whole:
            return ""
        with self._changed:
            steps = sum(isinstance(record, StepRecord) for record in self._waiting)
        return f"has not taken {steps} steps" if steps else "has not finished, and may lack the last steps"

    def give(self, records: Sequence[Record]) -> None:
        with self._changed:
            self._waiting.extend(records)
            self._changed.notify_all()

    def complete(self, done: Callable[[], None]) -> None:
        """Tell the recipient, after the records given before, that training is complete; then call `done`."""
        with self._changed:
            self._completed.append(done)
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def retire(self) -> None:
        """End after the current records, and leave waiting ones to another root."""
        with self._changed:
            self._retired = self._ended = True
            self._waiting.clear()
            self._changed.notify_all()

    def join(self, seconds: float) -> bool:
        """Wait that long; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # in the thread

    def _run(self) -> None:
        if self._before is not None and not self._outlive(self._before):
            return
        self._before = None
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                given, ended, retired = list(self._waiting), self._ended, self._retired
                completed = list(self._completed)
            if retired:
                self._whole = self._close()
                return
            watch = threading.Timer(SLOW_SECONDS, self._trouble, [f"it has not answered for {SLOW_SECONDS:g} s"])
            watch.daemon = True
            watch.start()
            try:
                self._write(given, complete=bool(completed))
            except Exception as error:  # whatever a logger raises
                self._trouble(f"{type(error).__name__}: {error}")
                with self._changed:
                    if not self._ended:
                        self._changed.wait_for(lambda: self._ended, AGAIN_SECONDS)
                if not ended:
                    continue
            finally:
                watch.cancel()
            if ended:
                self._whole = self._close() and not self._waiting and not self._delivery.behind
                return
            with self._changed:
                self._completed = self._completed[len(completed) :]
            for done in completed:
                done()

    def _has_work(self) -> bool:
        return bool(self._waiting or self._ended or self._delivery.behind or self._completed)

    def _outlive(self, before: "_LoggingThread") -> bool:
        """Wait until that one has ended; return False if this one must end first."""
        since = time.monotonic()
        while not before.join(POLL_SECONDS):
            if time.monotonic() > since + SLOW_SECONDS:
                self._trouble(f"the one before it has not ended for {SLOW_SECONDS:g} s")
            with self._changed:
                if self._ended:
                    return False
        return True

    def _write(self, given: Sequence[Record], *, complete: bool) -> None:
        self._delivery.write(given, complete=complete)
        self._troubled = False
        with self._changed:
            while self._waiting and self._delivery.has(self._waiting[0]):
                self._waiting.popleft()

    def _close(self) -> bool:
        try:
            self.recipient.close()
        except Exception as error:
            self._trouble(f"{type(error).__name__}: {error}")
            return False
        return True

    def _trouble(self, message: str) -> None:
        """Report the trouble once, until it works again."""
        logger.warning("%s fails: %s", self.recipient.who, message)
        if not self._troubled:
            self._troubled = True
            self._tell(
                WorkerWarning(reason=self.recipient.reason, message=f"{self.recipient.who}: {message}"[:MOST_TEXT])
            )


class _Countdown:
    """Calls `done` once, after `many` calls of `one`, or after that time in seconds."""

    def __init__(self, many: int, done: Callable[[], None], seconds: float) -> None:
        self._left, self._done, self._called, self._lock = many, done, False, threading.Lock()
        self._timer = threading.Timer(seconds, self._finish)
        self._timer.daemon = True
        if many:
            self._timer.start()
        else:
            self._finish()

    def one(self) -> None:
        with self._lock:
            self._left -= 1
            left = self._left
        if left == 0:
            self._timer.cancel()
            self._finish()

    def _finish(self) -> None:
        with self._lock:
            called, self._called = self._called, True
        if not called:
            self._done()
