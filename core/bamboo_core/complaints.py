"""Error messages for people, never empty.

Many exceptions have no text, such as asyncio's TimeoutError or a ProcessLookupError for a process that has just ended.
Every foreign exception that becomes text should pass through here, so that at least its type is shown.
"""

import contextlib
import logging
import sys


def said_by(error: BaseException) -> str:
    """Return an exception's text, or the name of its type if it has no text. Never raises, even if the exception's
    `str()` does.
    """
    try:
        text = str(error).strip()
    except Exception as failed:
        return f"{type(error).__name__}, whose str() raises {type(failed).__name__}"
    return text or type(error).__name__


def system_reason(error: OSError) -> str:
    """Return the operating system's error text, without errno and file name; `said_by(error)` if there is none."""
    return error.strerror or said_by(error)


def complaint_of(what: BaseException | str, doing: str = "") -> str:
    """Return a non-empty error message. what: the error, or its text. doing: the activity that failed, such as "while
    weights were written", which comes first.
    """
    reason = said_by(what) if isinstance(what, BaseException) else what.strip()
    reason = reason or "something went wrong that has no text"
    return f"{doing}: {reason}" if doing else reason


def complain(what: BaseException | str, doing: str = "", *, program: str = "bamboo") -> None:
    """Print an error message (`complaint_of`) on standard error, after the program's name. The message is lost if
    standard error cannot be written.
    """
    with contextlib.suppress(OSError):
        print(f"{program}: {complaint_of(what, doing)}", file=sys.stderr, flush=True)


class SilentErrorsNamed(logging.Filter):
    """A log handler's filter, which replaces each exception without text in a record by the name of its type."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(_with_text(value) for value in record.args)
        if isinstance(record.msg, BaseException):
            record.msg = said_by(record.msg)
        return True


def _with_text(value: object) -> object:
    return said_by(value) if isinstance(value, BaseException) and said_by(value) == type(value).__name__ else value
