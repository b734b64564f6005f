"""Bounded calls to a store: each has an external time limit and is retried a few times. A client's own timeouts do not
suffice: a hanging network file system answers no read, write or open.
"""

import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from bamboo_core.storage.url import without_secrets


class StorageError(Exception):
    """Error of a store that cannot fulfil a call, or whose content is unusable."""


class StoreUnavailable(StorageError):
    """Error of a store that is unreachable, too slow, full, or denies permission."""


_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
_LONGEST: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The cause of a store's failed call."""

    reason: str
    transient: bool = False  # a retry may succeed
    missing: bool = False  # the file does not exist


def explain(error: BaseException) -> Failure:
    """Explain a store's exception by its type, its errno or its HTTP status. An unknown failure counts as transient."""
    status = _status(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        detail = f" ({_said(error)})" if error.args and "bucket" in str(error).lower() else ""
        return Failure(reason=f"it is not there{detail}", missing=True)
    if isinstance(error, PermissionError) or status in (401, 403):
        return Failure(reason=f"permission denied ({_said(error)})")
    if isinstance(error, TimeoutError):
        return Failure(reason=f"the store did not answer in time ({_said(error)})", transient=True)
    if status is not None:
        passes = status in (408, 429) or status >= 500
        return Failure(reason=f"the store answered {status} ({_said(error)})", transient=passes)
    if isinstance(error, OSError) and error.errno in _FULL:
        return Failure(reason="no space left in the store")
    permanent = isinstance(error, NotADirectoryError | IsADirectoryError) or getattr(error, "errno", 0) == errno.EROFS
    return Failure(reason=_said(error), transient=not permanent)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of the exception's response; None if it has none."""
    for name in ("status_code", "status", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int) and 100 <= value < 600:
            return value
    return None


def _said(error: BaseException) -> str:
    """Return the exception's text in one line without credentials, after its type unless it is an OSError with text."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    message = without_secrets(text)[:_LONGEST].strip().rstrip(".")
    return (
        message
        if isinstance(error, OSError) and message
        else f"{type(error).__name__}: {message}"
        if message
        else type(error).__name__
    )


S = TypeVar("S")
T = TypeVar("T")
AT_ONCE: Final = 8  # concurrent calls of `at_once`
MOST_HANGING: Final = 8
END_SECONDS: Final = 5.0  # for a call's thread to end once it has its result


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """The time limit of a call, and its number of tries."""

    seconds: float = 60.0  # for a call that moves almost no data
    slowest: float = float(2 << 20)  # bytes per second; extends the limit by the data moved
    tries: int = 4
    pause: float = 0.5  # seconds before the second try, doubled before each further one

    def of(self, moved: int) -> float:
        """Return the time limit in seconds of a call that moves `moved` bytes."""
        return self.seconds + moved / self.slowest


class MissingFile(Exception):
    """Error because a file to be read is not in the store."""


class BoundedCalls:
    """A runner of calls, each in a thread of its own with a time limit. Thread-safe.

    A call's thread has ended when `call` returns, unless it hung: then it ends when the store answers, or with the
    process. With MOST_HANGING such threads, calls fail at once.
    """

    def __init__(self, limits: StoreLimits, sleep: Callable[[float], None] = time.sleep) -> None:
        self._limits, self._sleep = limits, sleep
        self._lock = threading.Lock()
        self._hanging = 0

    def call(self, what: str, function: Callable[[], T], moved: int = 0) -> T:
        """Run a function in a thread and return its result, with retries of transient failures.

        what: the start of the error's sentence, such as "cannot read s3://...". moved: bytes, for the time limit.
        Raises StoreUnavailable, MissingFile; FileExistsError and StorageError of the function pass unchanged.
        """
        pause = self._limits.pause
        for number in range(1, self._limits.tries + 1):
            with self._lock:
                hanging = self._hanging
            if hanging >= MOST_HANGING:
                raise StoreUnavailable(f"{what}: {hanging} calls to the store have not returned")
            outcome = self._once(function, self._limits.of(moved))
            error = outcome.error
            if error is None:
                return outcome.value  # type: ignore[no-any-return]
            if isinstance(error, FileExistsError | StorageError) or not isinstance(error, Exception):
                raise error
            failure = explain(error)
            if failure.missing:
                raise MissingFile(failure.reason)
            if not failure.transient or number == self._limits.tries:
                tried = f", tried {number} times" if number > 1 else ""
                raise StoreUnavailable(f"{what}: {failure.reason}{tried}")
            self._sleep(pause)
            pause *= 2
        raise AssertionError("at least one try")

    def _once(self, function: Callable[[], Any], seconds: float) -> "_Outcome":
        outcome = _Outcome()
        thread = threading.Thread(target=self._run, args=(function, outcome), name="store", daemon=True)
        thread.start()
        thread.join(seconds)
        with self._lock:
            if not outcome.done:
                outcome.abandoned = True
                self._hanging += 1
                return _Outcome(error=TimeoutError(f"nothing within {seconds:.0f} s"))
        thread.join(END_SECONDS)
        return outcome

    def _run(self, function: Callable[[], Any], outcome: "_Outcome") -> None:
        try:
            outcome.value = function()
        except BaseException as error:
            outcome.error = error
        with self._lock:
            outcome.done = True
            if outcome.abandoned:
                self._hanging -= 1


def at_once(function: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """Call a function for all items in up to AT_ONCE threads, and return the results in the items' order. Raises the
    first error. An interrupt of the caller does not wait for the threads.
    """
    waiting = list(enumerate(items))
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                number, item = waiting.pop()
            except IndexError:
                return
            try:
                results[number] = function(item)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, name="checkpoints", daemon=True) for _ in items[:AT_ONCE]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(items))]


@dataclass(slots=True)
class _Outcome:
    value: Any = None
    error: BaseException | None = None
    done: bool = False  # the function has returned or raised
    abandoned: bool = False  # the time limit passed first
