"""The background event loop, in its own thread: it runs jobs of the Python API, and calls of the trainer.

So a notebook's own loop does not matter. It starts at the first call, and ends with the interpreter.
"""

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")
END_SECONDS: Final = 90.0  # for cancelled work to end
Close = Callable[[], Coroutine[Any, Any, None]]


class _Background:
    """The loop, its thread, and what to close before the interpreter ends. A fork inherits none of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self.open: list[Close] = []

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop; start it at the first call in this process."""
        with self._lock:
            if self._loop is None or self._pid != os.getpid():
                self._loop, self._pid, self.open = asyncio.new_event_loop(), os.getpid(), []
                threading.Thread(target=self._loop.run_forever, name="bamboo", daemon=True).start()
                atexit.register(self._close_all)
            return self._loop

    def _close_all(self) -> None:
        if self._pid == os.getpid() and self.open:
            call(_all_of(self.open.copy()))


_BACKGROUND: Final = _Background()


async def _all_of(closing: list[Close]) -> None:
    await asyncio.gather(*(close() for close in closing), return_exceptions=True)


def call(work: Coroutine[Any, Any, T]) -> T:
    """Run work in the loop; return its result or raise its error. A signal cancels it and waits a while for its end."""
    ended = threading.Event()

    async def watched() -> T:
        try:
            return await work
        finally:
            ended.set()

    future = asyncio.run_coroutine_threadsafe(watched(), _BACKGROUND.loop())
    try:
        return future.result()
    except (KeyboardInterrupt, SystemExit):
        future.cancel()
        ended.wait(END_SECONDS)
        raise


def opened(close: Close) -> None:
    """Register a coroutine to call before the interpreter ends, unless it is `closed` first. Called in the loop."""
    _BACKGROUND.open.append(close)


def closed(close: Close) -> None:
    """Unregister a coroutine that `opened` has registered. Called in the loop."""
    if close in _BACKGROUND.open:
        _BACKGROUND.open.remove(close)
