"""Error messages for people, never empty.

Many exceptions have no text, such as asyncio's TimeoutError or a ProcessLookupError for a process that has just ended.
Every exception that becomes text passes through here, so that at least its type is shown.
"""

import contextlib
import logging
import sys


def said_by(error: BaseException) -> str:
    """Return the exception's text, or else its type. A user's exception may fail to give its text."""
    try:
        text = str(error).strip()
    except Exception as failed:
        return f"{type(error).__name__}, whose str() raises {type(failed).__name__}"
    return text or type(error).__name__


def system_reason(error: OSError) -> str:
    """Return the system's error text without number and file; `said_by` if it has none."""
    return error.strerror or said_by(error)


def complaint_of(what: BaseException | str, doing: str = "") -> str:
    """Return one sentence: the activity and its error. doing: such as "while weights were written"."""
    reason = said_by(what) if isinstance(what, BaseException) else what.strip()
    reason = reason or "something went wrong that has no text"
    return f"{doing}: {reason}" if doing else reason


def complain(what: BaseException | str, doing: str = "", *, program: str = "bamboo") -> None:
    """Print the sentence on standard error after the program's name. It is lost if standard error cannot be written."""
    with contextlib.suppress(OSError):
        print(f"{program}: {complaint_of(what, doing)}", file=sys.stderr, flush=True)


class SilentErrorsNamed(logging.Filter):
    """A filter for a log handler: an exception without text among a record's values is written as its type."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(_with_text(value) for value in record.args)
        if isinstance(record.msg, BaseException):
            record.msg = said_by(record.msg)
        return True


def _with_text(value: object) -> object:
    return said_by(value) if isinstance(value, BaseException) and said_by(value) == type(value).__name__ else value
