"""Signals that stop a program while it runs an event loop.

An exception in the middle of asyncio leaves things half done, such as a coroutine that is never awaited, and a signal
that the main thread blocks is taken by any other one. So signals are held while a loop is made, runs and is closed
(`run`), and a program takes them while its loop can call it (`taken`).
"""

import asyncio
import contextlib
import signal
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

from bamboo.stop_signals import STOP_SIGNALS, Held, held

T = TypeVar("T")


@contextlib.contextmanager
def taken(handler: Callable[[], object]) -> Iterator[None]:
    """Call the handler for each signal, held ones included, in the running loop; restore the signals' effect
    afterwards. A signal too late for the handler comes again then.
    """
    loop = asyncio.get_running_loop()
    coming: deque[int] = deque()
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def come(number: int, _: FrameType | None = None) -> None:
        coming.append(number)
        loop.call_soon_threadsafe(tell)

    def tell() -> None:
        if coming:
            coming.popleft()
            handler()

    with _woken(loop):
        try:
            for number in STOP_SIGNALS:
                signal.signal(number, come)
            for keeper in {id(one): one for one in before.values() if isinstance(one, Held)}.values():
                while keeper.noted:
                    come(keeper.noted.popleft())
            yield
        finally:
            for one, handled in before.items():
                signal.signal(one, handled)
            late = list(coming)
            coming.clear()
            for missed in late:
                signal.raise_signal(missed)


@contextlib.contextmanager
def _woken(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Wake the main thread, where Python runs signal handlers, whichever thread a signal came to."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.setblocking(False)

        def drain() -> None:
            with contextlib.suppress(BlockingIOError):
                ours.recv(4096)

        loop.add_reader(ours, drain)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(ours)


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run like `asyncio.run`, with signals held, which the coroutine is to take. Late ones come again afterwards."""
    with held():
        return asyncio.run(main())


def run_until_stopped(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run like `asyncio.run`; a signal cancels it and raises CancelledError."""

    async def work() -> T:
        task = asyncio.current_task()
        assert task is not None
        with taken(lambda: task.cancelling() or task.cancel()):  # what it closes then takes its time, but not for ever
            return await main()

    return run(work)
