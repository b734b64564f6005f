"""Gives the history to loggers, each in a thread of its own, which alone waits for it.

How far a logger has come is kept beside the history, so that a new root's goes on there.
"""

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from bamboo_core.control.protocol import LOGGERS_AWAITED, MOST_TEXT, Message, WorkerWarning
from bamboo_core.history.files import HistoryFiles
from bamboo_core.history.merge import merged
from bamboo_core.history.records import EvaluationRecord, EventRecord, Record, StepRecord
from bamboo_core.storage.url import parse_url
from bamboo_trainer.loggers.interface import Logger, LoggerFacts, MakeLogger

logger = logging.getLogger(__name__)

MOST_WAITING: Final = 20_000  # records; a logger that is further behind goes without the oldest
AGAIN_SECONDS: Final = 10.0  # after a failure
POLL_SECONDS: Final = 0.5  # while one waits for the one before it
VERSION: Final = 2  # of `Reached`
SLOW_SECONDS: Final = 60.0  # in which a logger should have taken what it was given


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """What a logger has been given: steps up to this one, evaluations up to that (attempt, step), and of each source
    the events up to that number. version: 1 had counted steps from 0, and had an evaluation in the step after it.
    """

    attempt: int = 0
    step: int = 0
    evaluated: tuple[int, int] = (0, -1)
    events: dict[str, int] = {}
    version: int = 1

    def has(self, record: Record) -> bool:
        match record:
            case StepRecord():
                return (record.attempt, record.step) <= (self.attempt, self.step)
            case EvaluationRecord():
                return (record.attempt, record.step) <= self.evaluated
            case EventRecord():
                return record.number <= self.events.get(record.source, 0)
        return (record.attempt, record.last) <= (self.attempt, self.step)

    def after(self, records: Sequence[Record]) -> "Reached":
        attempt, step, evaluated, events = self.attempt, self.step, self.evaluated, dict(self.events)
        for record in records:
            if isinstance(record, StepRecord):
                attempt, step = max((attempt, step), (record.attempt, record.step))
            elif isinstance(record, EvaluationRecord):
                evaluated = max(evaluated, (record.attempt, record.step))
            elif isinstance(record, EventRecord):
                events[record.source] = max(record.number, events.get(record.source, 0))
        return Reached(attempt=attempt, step=step, evaluated=evaluated, events=events, version=VERSION)


def reached(data: bytes) -> Reached:
    """As it was written, by any version; of nothing: that nothing was given."""
    found = msgspec.json.decode(data, type=Reached) if data else Reached(version=VERSION)
    if found.version > 1:
        return found
    return msgspec.structs.replace(found, step=found.step + 1, evaluated=(found.attempt, found.step), version=VERSION)


def facts_of(job: str, url: str) -> LoggerFacts:
    parsed = parse_url(url, "the URL of a history")
    run = hashlib.blake2b(f"{job} {parsed.path}".encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return LoggerFacts(job=job, run=run, folder=parsed.path if parsed.protocol == "file" else "")


class LoggingThreads:
    """loggers: by name. tell: to the coordinator. They begin with `begin`."""

    def __init__(
        self, loggers: Mapping[str, MakeLogger], facts: LoggerFacts, url: str, tell: Callable[[Message], None]
    ) -> None:
        self._loggers, self._facts, self._url, self._tell = loggers, facts, url, tell
        self._threads: list[_LoggingThread] = []  # while this worker is the root
        self._retired: dict[str, _LoggingThread] = {}  # by name: the last one that was told to leave

    def begin(self) -> None:
        """This worker is the root; what is in the history and was not given is given first."""
        if not self._threads:
            for name, make in self._loggers.items():
                before = self._retired.get(name)
                self._threads.append(_LoggingThread(name, make, self._facts, self._url, self._tell, before))

    def retire(self) -> None:
        """This worker is the root no longer: another one's loggers go on, and two must not write into the same run."""
        for thread in self._threads:
            thread.retire()
            self._retired[thread.name] = thread
        self._threads = []

    def give(self, records: Sequence[Record]) -> None:
        """These are in the history now."""
        for thread in self._threads:
            thread.give(records)

    def announce_end(self, seconds: float) -> None:
        """Tells that the end waits for those that have been given something, and for how long at most."""
        if names := [thread.name for thread in self._threads]:
            who = "the logger" if len(names) == 1 else "the loggers"
            text = f"waiting up to {seconds:g} s for {who} {', '.join(names)} to take all of the history"
            self._tell(WorkerWarning(reason=LOGGERS_AWAITED, message=text[:MOST_TEXT]))

    def close(self, seconds: float) -> None:
        """At the worker's end: what waits is still given if that takes no longer. What is missing is told. Those of an
        earlier time as the root may close within that time, too.
        """
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.end()
        for thread in self._retired.values():
            thread.join(max(0.0, until - time.monotonic()))
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            if missing := thread.missing():
                text = f"the logger {thread.name} {missing}; `bamboo history --to` writes the history into it"
                logger.warning("%s", text)
                self._tell(WorkerWarning(reason="LoggerIncomplete", message=text[:MOST_TEXT]))


class _LoggingThread:
    """before: the one that had that name, which has to be gone before this one reads how far it has come."""

    def __init__(
        self,
        name: str,
        make: MakeLogger,
        facts: LoggerFacts,
        url: str,
        tell: Callable[[Message], None],
        before: "_LoggingThread | None",
    ) -> None:
        self.name, self._make, self._facts, self._tell = name, make, facts, tell
        self._files = HistoryFiles(url)
        self._changed = threading.Condition()
        self._waiting: deque[Record] = deque(maxlen=MOST_WAITING)
        self._logger: Logger | None = None
        self._reached: Reached | None = None
        self._ended = self._retired = self._troubled = False
        self._whole = False  # it has ended, and its logger has taken and closed everything
        self._before = before
        self._thread = threading.Thread(target=self._run, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def missing(self) -> str:
        """What it has not done, in words, after its end or instead of it; "" if it has done all."""
        if self._whole:
            return ""
        with self._changed:
            steps = sum(isinstance(record, StepRecord) for record in self._waiting)
        return f"has not taken {steps} steps" if steps else "has not finished, and may lack the last steps"

    def give(self, records: Sequence[Record]) -> None:
        with self._changed:
            self._waiting.extend(records)
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def retire(self) -> None:
        """It ends after what it is doing, and leaves to another root what waits."""
        with self._changed:
            self._retired = self._ended = True
            self._waiting.clear()
            self._changed.notify_all()

    def join(self, seconds: float) -> bool:
        """Waits that long; has it gone?"""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # in the thread

    def _run(self) -> None:
        if self._before is not None and not self._outlive(self._before):
            return
        self._before = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended or self._reached is None)
                given, ended, retired = list(self._waiting), self._ended, self._retired
            if retired:
                self._whole = self._close()
                return
            watch = threading.Timer(SLOW_SECONDS, self._trouble, [f"it has not answered for {SLOW_SECONDS:g} s"])
            watch.daemon = True
            watch.start()
            try:
                self._write(given)
            except Exception as error:  # whatever a logger raises
                self._logger = None
                self._trouble(f"{type(error).__name__}: {error}")
                with self._changed:
                    if not self._ended:
                        self._changed.wait_for(lambda: self._ended, AGAIN_SECONDS)
                if not ended:
                    continue
            finally:
                watch.cancel()
            if ended:
                self._whole = self._close() and not self._waiting and self._reached is not None
                return

    def _outlive(self, before: "_LoggingThread") -> bool:
        """Waits until that one has gone; False if this one's own time is over first."""
        since = time.monotonic()
        while not before.join(POLL_SECONDS):
            if time.monotonic() > since + SLOW_SECONDS:
                self._trouble(f"the one before it has not ended for {SLOW_SECONDS:g} s")
            with self._changed:
                if self._ended:
                    return False
        return True

    def _write(self, given: Sequence[Record]) -> None:
        before = self._reached
        if before is None:  # this is the beginning, or nothing has worked yet
            before = reached(self._files.read_bytes(self._file))
            given = merged([*self._files.read_all(), *given])
        new, after = [record for record in given if not before.has(record)], before
        if self._logger is None:
            self._logger = self._make(self._facts)
        if new:
            self._logger.write(new)
            after = before.after(new)
            self._files.write_bytes(self._file, msgspec.json.encode(after))
        self._reached, self._troubled = after, False
        with self._changed:
            while self._waiting and after.has(self._waiting[0]):
                self._waiting.popleft()

    def _close(self) -> bool:
        if self._logger is not None:
            try:
                self._logger.close()
            except Exception as error:
                self._trouble(f"{type(error).__name__}: {error}")
                return False
        return True

    @property
    def _file(self) -> str:
        return f"logger-{self.name}.json"

    def _trouble(self, message: str) -> None:
        """Said once, until it works again."""
        logger.warning("the logger %s fails: %s", self.name, message)
        if not self._troubled:
            self._troubled = True
            self._tell(WorkerWarning(reason="LoggerFailed", message=f"the logger {self.name}: {message}"[:MOST_TEXT]))
