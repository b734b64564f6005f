"""An asyncio event loop in a background thread, for local jobs, requests to clusters and calls to the trainer.

The API therefore also works where another event loop runs, such as in a notebook. The thread ends with the interpreter.
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
    """The background event loop, and the coroutine functions to call at exit. A forked process starts its own loop."""

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
    """Run a coroutine in the background loop, wait for it, and return its result or raise its error.

    Must not be called in the loop itself. KeyboardInterrupt and SystemExit cancel the coroutine, and are raised after
    its end, or after END_SECONDS.
    """
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
    """Register a coroutine function to call at exit, unless `closed` unregisters it first. Only for use in the loop."""
    _BACKGROUND.open.append(close)


def closed(close: Close) -> None:
    """Unregister a coroutine function, if `opened` has registered it. Only for use in the loop."""
    if close in _BACKGROUND.open:
        _BACKGROUND.open.remove(close)
