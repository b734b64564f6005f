"""Work in processes that end with the process that started them, however it ends."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from bamboo.simulation.figures import SimulationError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
T = TypeVar("T")
R = TypeVar("R")


def in_processes(work: Callable[[T], R], items: Sequence[T], jobs: int) -> Iterator[R]:
    """Yield the results in the order of the items. jobs: processes, at most one for each processor; 1 is this one.

    Raises the work's exceptions, and SimulationError if a process is killed. The processes end with the iterator: at
    once, in the middle of their work, if it is abandoned, as by Ctrl-C, or if this process is killed.
    """
    if jobs == 1 or len(items) == 1:
        yield from map(work, items)
        return
    # Nothing is sent: the other end is closed when this process closes it or ends.
    reader, writer = Pipe(duplex=False)
    count = min(jobs, os.cpu_count() or 1)
    executor = ProcessPoolExecutor(
        count, mp_context=get_context("fork"), initializer=_begin, initargs=(reader, writer, work)
    )
    try:
        begun: deque[Future[R]] = _begun(executor, items)
        while begun:
            yield begun.popleft().result()
        executor.shutdown(wait=True)
    except BrokenProcessPool:
        raise SimulationError(
            "a process that simulated was killed, perhaps for want of memory; --jobs 1 needs the least"
        ) from None
    finally:
        # Do not cancel futures: the executor's thread cannot tell a cancelled one that its process is gone.
        writer.close()
        executor.shutdown(wait=True)
        reader.close()


def _begun(executor: ProcessPoolExecutor, items: Sequence[T]) -> deque[Future[R]]:
    """Fork the processes and submit the items. Signals are blocked until the processes have set their handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return deque(executor.submit(_do, item) for item in items)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Process:
    """State inherited from the parent by fork instead of sent with each item, since it may hold a whole recording."""

    work: Callable[[Any], Any]


def _do(item: Any) -> Any:
    return _Process.work(item)


def _begin(reader: Connection, writer: Connection, work: Callable[[Any], Any]) -> None:
    """Start a process. It ignores Ctrl-C and SIGTERM, which may reach all processes; the parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    writer.close()
    _Process.work = work
    threading.Thread(target=_end_with_parent, args=(reader,), daemon=True).start()


def _end_with_parent(reader: Connection) -> None:
    reader.poll(None)
    os._exit(1)
