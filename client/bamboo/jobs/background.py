"""The event loop in which everything of the Python API happens: in a thread of its own, beside a notebook's own loop.

It is made when the first thing is asked of it, and ends with the interpreter.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

T = TypeVar("T")
END_SECONDS: Final = 90.0  # for what is cancelled to end


class _Background:
    """The loop and its thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        with self._lock:
            if self._loop is None or self._pid != os.getpid():  # a fork has no threads but its own
                self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
                threading.Thread(target=self._loop.run_forever, name="bamboo", daemon=True).start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)


_BACKGROUND: Final = _Background()


def call(work: Coroutine[Any, Any, T]) -> T:
    """What the work returns or raises. Ctrl-C cancels it, and waits for a while until it has ended."""
    ended = threading.Event()

    async def watched() -> T:
        try:
            return await work
        finally:
            ended.set()

    future = _BACKGROUND.submit(watched())
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        ended.wait(END_SECONDS)
        raise


async def wait(work: Coroutine[Any, Any, T]) -> T:
    """What the work returns or raises, for whoever awaits it in a loop of their own, as a notebook has one."""
    return await asyncio.wrap_future(_BACKGROUND.submit(work))
