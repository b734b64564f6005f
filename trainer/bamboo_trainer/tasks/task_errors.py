"""Exceptions for errors of the user's task, and functions that classify, locate and describe an error."""

import errno
import sysconfig
import traceback
from pathlib import Path
from typing import Final

import torch

from bamboo_core.text import one_line

OWN: Final = Path(__file__).parents[1]  # the folder of all of Bamboo's code that uses torch
MODELS: Final = OWN / "models"  # tasks, though they come with Bamboo
LIBRARIES: Final = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
PYTHON: Final = Path(sysconfig.get_path("stdlib"))
NO_MEMORY: Final = ("can't allocate memory", "Cannot allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")


class TaskError(ValueError):
    """Raised if the user's task is to blame. The message names the part of the task and the mistake."""


class NotDeterministic(TaskError):
    """Raised if repeated work gives, or could give, different bits. The message names what differs, or the cause."""


class TaskOutOfMemory(MemoryError):
    """Raised if memory runs out, on the host or on the device. The message names the part of the task."""


class RealInterrupt(KeyboardInterrupt):
    """A KeyboardInterrupt from a real SIGINT, unlike one that the task's code raises."""


def is_an_error(error: BaseException) -> bool:
    """Return whether an exception counts as an error: every Exception does, and any other exception from the task's
    code, except SystemExit and RealInterrupt.
    """
    return isinstance(error, Exception) or (not isinstance(error, SystemExit | RealInterrupt) and is_tasks(error))


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, in any of the forms in which Python, the system and torch report it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in _message(error) for words in NO_MEMORY)


def _message(error: BaseException) -> str:
    """Return an error's message in one line. If a user's exception fails to convert to text, say so instead."""
    try:
        return one_line(str(error))
    except Exception as failed:
        return f"str() of it raises {type(failed).__name__}"


def describe(error: BaseException) -> str:
    """Return an error's type, its message and, if known, its place in the user's code or a library, in one line."""
    message, place = _message(error), where(error)
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"{text} ({place})" if place else text


def complaint(error: ValueError) -> str:
    """Return an error's message in one line, with its place (`where`) if that is known and not in a Bamboo model."""
    message, frame = _message(error), _innermost(error)
    own = frame is None or Path(frame.filename).is_relative_to(MODELS)
    return message if own else f"{message} ({where(error)})"


def where(error: BaseException) -> str:
    """Return where an error was raised: file, line and function of the innermost frame in the user's code or in one of
    Bamboo's models; if none, of the innermost frame in an installed library other than torch; if none, "".
    """
    frame = _innermost(error)
    return f"{shown(frame.filename)} line {frame.lineno}, in {frame.name}" if frame else ""


def _innermost(error: BaseException) -> traceback.FrameSummary | None:
    frames = traceback.extract_tb(error.__traceback__)
    users = [f for f in frames if is_users(f.filename)] or [f for f in frames if _is_librarys(f.filename)]
    return users[-1] if users else None


def is_tasks(error: BaseException) -> bool:
    """Return whether the user's code, or a library that it called, raised the error, and not Bamboo's own code."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    mattering = [file for file in files if is_users(file) or _is_own(file)]
    return bool(mattering) and is_users(mattering[-1])


class in_task:
    """A context manager for a call into the task. It turns an error into a TaskError or TaskOutOfMemory whose message
    begins with `what`. A TaskError passes unchanged.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None and is_an_error(error) and not isinstance(error, TaskError):
            raise blamed(self._what, error) from error


def blamed(what: str, error: BaseException) -> TaskError | TaskOutOfMemory:
    """Return a TaskError or TaskOutOfMemory for an error of the task. what: the part of the task that raised it."""
    if ran_out_of_memory(error):
        return TaskOutOfMemory(f"{what} ran out of memory: {describe(error)}")
    return TaskError(f"{what} raised {describe(error)}")


def _is_own(file: str) -> bool:
    return Path(file).is_relative_to(OWN) and not Path(file).is_relative_to(MODELS)


def is_users(file: str) -> bool:
    """Return whether a source file is user code or one of Bamboo's models, not other Bamboo, Python or library code."""
    path = Path(file)
    return path.is_relative_to(MODELS) or not (
        file.startswith("<") or path.is_relative_to(OWN) or path.is_relative_to(PYTHON) or _is_installed(path)
    )


def _is_librarys(file: str) -> bool:
    path = Path(file)
    return _is_installed(path) and not path.is_relative_to(OWN) and "torch" not in path.parts


def _is_installed(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in LIBRARIES)


def shown(file: str) -> str:
    """Return a file's path, relative to the current folder if the file is in it."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, FileNotFoundError):  # it is elsewhere, or the folder has been removed
        return file
