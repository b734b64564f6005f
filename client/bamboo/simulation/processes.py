"""Work in processes that end with the process that started them, however it ends."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from typing import Any, TypeVar

from bamboo.simulation.figures import SimulationError
from bamboo.stop_signals import STOP_SIGNALS
from bamboo_core.orphans import end_with

T = TypeVar("T")
R = TypeVar("R")


def in_processes(work: Callable[[T], R], items: Sequence[T], jobs: int) -> Iterator[R]:
    """Yield the results in the order of the items. jobs: processes, at most one for each processor; 1 is this one.

    Raises the work's exceptions, and SimulationError if a process is killed. If the iterator is abandoned, as by
    Ctrl-C, the processes are killed in the middle of their work; if this process is killed, the kernel kills them.
    """
    if jobs == 1 or len(items) == 1:
        yield from map(work, items)
        return
    others = set(active_children())
    executor = ProcessPoolExecutor(
        min(jobs, os.cpu_count() or 1),
        mp_context=get_context("fork"),
        initializer=_begin,
        initargs=(work, os.getpid()),
    )
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the processes have set their handlers
        try:
            results = executor.map(_do, items)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield from results
    except BrokenProcessPool:
        raise SimulationError(
            "a process that simulated was killed, perhaps for want of memory; --jobs 1 needs the least"
        ) from None
    finally:
        for process in set(active_children()) - others:
            process.kill()
        executor.shutdown()


class _Process:
    """State inherited from the parent by fork instead of sent with each item, since it may hold a whole recording."""

    work: Callable[[Any], Any]


def _do(item: Any) -> Any:
    return _Process.work(item)


def _begin(work: Callable[[Any], Any], parent: int) -> None:
    """Start a process. It ignores Ctrl-C and SIGTERM, which may reach all processes; the parent kills it."""
    end_with(parent)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    _Process.work = work
