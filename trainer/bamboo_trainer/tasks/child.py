"""Work in a child process, for what a task's code must not remember: tensors without data that it keeps in a cache."""

import ctypes
import os
import selectors
import signal
from collections.abc import Iterator
from typing import Final

from bamboo_core.complaints import said_by
from bamboo_trainer.tasks.task_errors import told

SILENT_SECONDS: Final = 300.0  # a child that has nothing to say for so long is given up
MOST_TEXT: Final = 2000  # bytes
PR_SET_PDEATHSIG: Final = 1


def lines_of_child(lines: Iterator[str]) -> tuple[list[str], str]:
    """What the iterator yields in a child process, and why it ended early; "" if it did not.

    A line is taken as soon as it is there, so what came before an error, or the end of the process, counts.
    """
    reading, writing = os.pipe()
    try:
        child = _fork(lines, writing)
    except OSError as error:
        os.close(reading)
        return [], f"no process could be started: {said_by(error)}"
    finally:
        os.close(writing)
    try:
        *said, end = _read(reading).split("\n")
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)  # it has said all that it had to say, or is stuck
        os.waitpid(child, 0)
    return (said[:-1], "") if said and said[-1] == _END and not end else (said, end or _NO_WORD)


_END: Final = "."  # the last line of a child that has come to its end
_NO_WORD: Final = "the process ended without a result"


def _fork(lines: Iterator[str], pipe: int) -> int:
    """The child writes the lines and, if it cannot go on, why; it never returns."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for line in lines:
            if os.getppid() != parent:
                break
            os.write(pipe, f"{line}\n".encode())
        else:
            os.write(pipe, f"{_END}\n".encode())
    except BaseException as error:
        os.write(pipe, " ".join(told(error).split()).encode()[:MOST_TEXT])
    finally:
        os._exit(0)


def _read(pipe: int) -> str:
    """What is written to the pipe, until it is closed or nothing more comes."""
    said = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while selector.select(SILENT_SECONDS):
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                return said.decode(errors="replace")
            said += chunk
    return f"{said.decode(errors='replace')}no result within {SILENT_SECONDS:g} s"
