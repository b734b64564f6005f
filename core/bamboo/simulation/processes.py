"""Work over processes that end with the one that started them, however that one ends."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_processes(work: Callable[[T], R], items: Sequence[T], jobs: int) -> Iterator[R]:
    """The results in the order of the items. jobs: processes, at most one for each processor; 1 is this one.

    Raises what the work raises. The processes end with the iterator: if it is left early, as by Ctrl-C, at once, in the
    middle of their work; and if this process is killed, too.
    """
    if jobs == 1 or len(items) == 1:
        yield from map(work, items)
        return
    # Nothing is ever sent: the other end is closed when this process closes it, or when it is gone.
    reader, writer = Pipe(duplex=False)
    count = min(jobs, os.cpu_count() or 1)
    executor = ProcessPoolExecutor(count, initializer=_depend_on_parent, initargs=(reader, writer))
    try:
        yield from executor.map(work, items)
        executor.shutdown(wait=True)
    finally:
        writer.close()
        executor.shutdown(wait=True, cancel_futures=True)
        reader.close()


def _depend_on_parent(reader: Connection, writer: Connection) -> None:
    """Ctrl-C goes to all processes of the terminal; the parent ends the others. SIGTERM ends them as usual."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    writer.close()
    threading.Thread(target=_end_with_parent, args=(reader,), daemon=True).start()


def _end_with_parent(reader: Connection) -> None:
    reader.poll(None)
    os._exit(1)
