"""The signals with which a person or a system stops a program, and what they do at each moment of its life.

While nothing has been begun the process ends on the spot. While a command works, SystemExit goes through it, so that
all that is open is closed. In the middle of asyncio an exception would leave things half done, a coroutine that was
never awaited, say, and a blocked signal is still taken by any other thread: so while a loop is made, runs and is closed
signals are held (`run`), and the program in the loop takes them (`taken`). Each signal has its effect once, wherever it
comes.
"""

import asyncio
import contextlib
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, Final, TypeVar

from bamboo.names import EXIT_INTERRUPTED

T = TypeVar("T")
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_by_exception() -> None:
    """From now on SystemExit with EXIT_INTERRUPTED is raised in the main thread, wherever that is."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: sys.exit(EXIT_INTERRUPTED))


class _Held:
    """A handler that only notes what comes."""

    def __init__(self) -> None:
        self.noted: deque[int] = deque()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.noted.append(number)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Meanwhile signals have no effect. The first that nobody has taken comes again at the end."""
    keeper = _Held()
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, keeper)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if keeper.noted:
            signal.raise_signal(keeper.noted[0])


@contextlib.contextmanager
def taken(handler: Callable[[], object]) -> Iterator[None]:
    """Calls the handler for each of them, in the running loop, and for those that are held; afterwards they do what
    they did before. What comes too late for the handler comes again then.
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
            for keeper in {id(one): one for one in before.values() if isinstance(one, _Held)}.values():
                while keeper.noted:
                    come(keeper.noted.popleft())
            yield
        finally:
            for number, handled in before.items():
                signal.signal(number, handled)
            late = list(coming)
            coming.clear()
            for number in late:
                signal.raise_signal(number)


@contextlib.contextmanager
def _woken(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Python runs handlers in the main thread, which may be waiting: whichever thread a signal came to, wake it."""
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
    """`asyncio.run`, with signals held: what it runs is to take them. Those that come too late come again afterwards."""
    with held():
        return asyncio.run(main())


def run_until_stopped(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """`asyncio.run`, of which a signal is the cancellation. Raises CancelledError then."""

    async def work() -> T:
        task = asyncio.current_task()
        assert task is not None
        with taken(lambda: task.cancelling() or task.cancel()):  # what it closes then takes its time, but not for ever
            return await main()

    return run(work)
