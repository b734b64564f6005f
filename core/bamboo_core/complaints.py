"""What goes wrong, as a person reads it: never without a word.

Many exceptions have no text, such as asyncio's TimeoutError and the ProcessLookupError of a process that has just
ended. Where an exception becomes text it goes through here, and what is left of it is its type at least.
"""

import contextlib
import logging
import sys


def said_by(error: BaseException) -> str:
    """What the exception says, or else its type. An exception of the user's may be unable to say what it is."""
    try:
        text = str(error).strip()
    except Exception as failed:
        return f"{type(error).__name__}, whose str() raises {type(failed).__name__}"
    return text or type(error).__name__


def system_reason(error: OSError) -> str:
    """The system's words alone, without number and file; the same as `said_by` if it has none."""
    return error.strerror or said_by(error)


def complaint_of(what: BaseException | str, doing: str = "") -> str:
    """One sentence: what was being done, and what went wrong with it. doing: "while weights were written"."""
    said = said_by(what) if isinstance(what, BaseException) else what.strip()
    said = said or "something went wrong that has no text"
    return f"{doing}: {said}" if doing else said


def complain(what: BaseException | str, doing: str = "", *, program: str = "bamboo") -> None:
    """The sentence on standard error, with the program's name before it. Where nobody can hear it, it is lost."""
    with contextlib.suppress(OSError):
        print(f"{program}: {complaint_of(what, doing)}", file=sys.stderr, flush=True)


class SilentErrorsNamed(logging.Filter):
    """A filter for a log's handler: an exception without text among a record's values is written as its type."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(_with_text(value) for value in record.args)
        if isinstance(record.msg, BaseException):
            record.msg = said_by(record.msg)
        return True


def _with_text(value: object) -> object:
    return said_by(value) if isinstance(value, BaseException) and said_by(value) == type(value).__name__ else value
