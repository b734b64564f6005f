"""Work in processes that end with the process that started them, however it ends."""

import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
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
    There is no thread that could see a process die and print a traceback, as in an executor of concurrent.futures.
    """
    if jobs == 1 or len(items) == 1:
        yield from map(work, items)
        return
    context = get_context("fork")
    processes, connections = [], []
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the processes have set their handlers
        try:
            for _ in range(min(jobs, os.cpu_count() or 1, len(items))):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(work, items, os.getpid(), theirs))
                process.start()
                processes.append(process)
                connections.append(ours)
                theirs.close()  # so that the end of the process, the only one to hold it, ends the connection
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for result, error in _outcomes(len(items), connections):
            if error is not None:
                raise error
            yield result
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _outcomes(count: int, connections: Sequence["Connection[Any, Any]"]) -> Iterator[tuple[Any, Exception | None]]:
    """Yield each item's result or exception in order, and send each process the number of its next item."""
    unsent = iter(range(count))
    outcomes: dict[int, tuple[Any, Exception | None]] = {}
    try:
        for connection, following in zip(connections, unsent, strict=False):
            connection.send(following)
        for number in range(count):
            while number not in outcomes:
                idle: list[Any] = wait(connections)
                outcomes.update(connection.recv() for connection in idle)
                for connection, following in zip(idle, unsent, strict=False):
                    connection.send(following)
            yield outcomes.pop(number)
    except (EOFError, ConnectionError):
        raise SimulationError(
            "a process that simulated was killed, perhaps for want of memory; --jobs 1 needs the least"
        ) from None


def _serve(work: Callable[[T], R], items: Sequence[T], parent: int, connection: "Connection[Any, Any]") -> None:
    """Do the items whose numbers come, until the parent kills this process.

    The process ignores Ctrl-C and SIGTERM, which may reach all processes. It has work and items by fork, because they
    may hold a whole recording.
    """
    end_with(parent)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    while True:
        number = connection.recv()
        outcome: tuple[R | None, Exception | None]
        try:
            outcome = work(items[number]), None
        except Exception as error:
            error.add_note(traceback.format_exc())
            outcome = None, error
        connection.send((number, outcome))
