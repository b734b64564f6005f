"""The waits of tests for something that others do: processes, threads, or tasks of the same event loop."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 120.0  # for anything on a loaded machine
PAUSE_SECONDS, TASK_PAUSE_SECONDS = 0.05, 0.005


def until(find: Callable[[], T], seconds: float = PATIENCE, seen: Callable[[], object] = lambda: "") -> T:
    """Return the first true value that `find` returns. Raises AssertionError after that many seconds.

    seen: returns what the error shows.
    """
    end = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < end, f"not within {seconds} s: {seen()}"
        time.sleep(PAUSE_SECONDS)
    return found


async def in_time(find: Callable[[], T], seconds: float = PATIENCE) -> T:
    """Do as `until` does, in the event loop whose tasks `find` looks at. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not (found := find()):
            await asyncio.sleep(TASK_PAUSE_SECONDS)
    return found
