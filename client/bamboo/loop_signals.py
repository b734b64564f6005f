"""Handling of SIGINT, SIGTERM and SIGHUP while an asyncio event loop runs.

An exception that a signal raises within asyncio leaves work half done, such as a coroutine that is never awaited. So
`run` holds signals while the loop exists, and `taken` calls a handler in the loop for each signal.
"""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from bamboo.stop_signals import STOP_SIGNALS, Held, held

T = TypeVar("T")


@contextlib.contextmanager
def taken(handler: Callable[[], object]) -> Iterator[None]:
    """During the block, call the handler in the running loop for each stop signal, including signals held before.

    Outside the main thread it does nothing, since only the main thread handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, handler)
    keeper = before[signal.SIGINT]  # one handler holds all signals
    while isinstance(keeper, Held) and keeper.noted:
        keeper.noted.popleft()
        loop.call_soon(handler)
    try:
        yield
    finally:
        for number, effect in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, effect)


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main()` like `asyncio.run`, with signals held. The first signal that is not `taken` is raised afterwards."""
    with held():
        return asyncio.run(main())


def run_until_stopped(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main()` like `asyncio.run`; a stop signal cancels it, which raises CancelledError."""

    async def work() -> T:
        task = asyncio.current_task()
        assert task is not None
        with taken(lambda: task.cancelling() or task.cancel()):  # then it may close what is open
            return await main()

    return run(work)
