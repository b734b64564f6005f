"""Helpers that wait until another process, thread or task of the event loop has made a condition true."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 120.0  # for anything on a loaded machine
PAUSE_SECONDS, TASK_PAUSE_SECONDS = 0.05, 0.005


def until(find: Callable[[], T], seconds: float = PATIENCE, seen: Callable[[], object] = lambda: "") -> T:
    """Call `find` until it returns a true value, and return that value. Raises AssertionError after `seconds`.

    seen: returns details for the error's message.
    """
    end = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < end, f"not within {seconds} s: {seen()}"
        time.sleep(PAUSE_SECONDS)
    return found


async def in_time(find: Callable[[], T], seconds: float = PATIENCE) -> T:
    """Await a true value of `find`, and return it. Other tasks run meanwhile. Raises TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not (found := find()):
            await asyncio.sleep(TASK_PAUSE_SECONDS)
    return found
