"""Work in a child process, so that the task's code does not cache tensors without data."""

import os
import signal
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Final, TypeVar

from bamboo_core.complaints import said_by
from bamboo_core.orphans import end_with
from bamboo_trainer.tasks.task_errors import told

SILENT_SECONDS: Final = 300.0  # a child that sends nothing for this long is given up
MOST_TEXT: Final = 2000  # characters

T = TypeVar("T")


def from_child(items: Iterator[T]) -> tuple[list[T], str]:
    """Return what the iterator yields in a child process, and why it ended early; "" if it did not.

    A line is taken as soon as it is written, so lines before an error, or the end of the process, count.
    """
    reading, writing = Pipe(duplex=False)
    found: list[T] = []
    with reading:
        try:
            with writing:
                child = _fork(items, writing)
        except OSError as error:
            return [], f"no process could be started: {said_by(error)}"
        try:
            while reading.poll(SILENT_SECONDS):
                item, end = reading.recv()
                if end is not None:
                    return found, end
                found.append(item)
        except (EOFError, OSError):
            return found, "the process ended without a result"
        finally:
            os.kill(child, signal.SIGKILL)  # it has sent all that it had, or is stuck
            os.waitpid(child, 0)
    return found, f"no result within {SILENT_SECONDS:g} s"


def _fork(items: Iterator[object], pipe: Connection) -> int:
    """Fork a child, which sends each item and, at the end, why it cannot continue. Return its process id."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with(parent)
        for item in items:
            if os.getppid() != parent:
                break
            pipe.send((item, None))
        pipe.send((None, ""))
    except BaseException as error:
        pipe.send((None, " ".join(told(error).split())[:MOST_TEXT]))
    finally:
        os._exit(0)
