"""A pool of processes for simulations, which end with their parent process even if it is killed."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from typing import Any, TypeVar

from bamboo.simulation.figures import SimulationError
from bamboo.stop_signals import STOP_SIGNALS, held
from bamboo_core.orphans import end_with

T = TypeVar("T")
R = TypeVar("R")
_inherited: list[tuple[Callable[[Any], Any], Sequence[Any]]] = []  # in a process of the pool: its work and all items


def in_processes(work: Callable[[T], R], items: Sequence[T], jobs: int) -> Iterator[R]:
    """Apply `work` to each item in up to `jobs` forked processes; yield the results in order.

    A single job or item runs in this process. Raises the work's exceptions, and SimulationError if a process is killed.
    The processes are killed at once if the iterator is abandoned, as by Ctrl-C, or if this process is killed.
    """
    if jobs == 1 or len(items) < 2:
        yield from map(work, items)
        return
    others = active_children()
    count = min(jobs, os.cpu_count() or 1, len(items))
    pool = ProcessPoolExecutor(count, get_context("fork"), _begin, (work, items, os.getpid()))
    try:
        with held():  # in the middle of a fork the exception of a signal would be lost
            futures = [pool.submit(_do, number) for number in range(len(items))]
        for future in futures:
            yield future.result()
    except BrokenProcessPool:
        raise SimulationError(
            "a process that simulated was killed, perhaps for want of memory; --jobs 1 needs the least"
        ) from None
    finally:
        for process in active_children():
            if process not in others:
                process.kill()
        pool.shutdown()


def _begin(work: Callable[[T], R], items: Sequence[T], parent: int) -> None:
    """Initialize a process of the pool, which inherits work and items by fork, since recordings are slow to send.

    It ends with the process `parent`, and ignores stop signals, since Ctrl-C reaches all processes of a group.
    """
    end_with(parent)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _inherited.append((work, items))


def _do(number: int) -> Any:
    work, items = _inherited[-1]
    return work(items[number])
