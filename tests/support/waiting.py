"""The wait of tests for something that real processes do."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PAUSE_SECONDS = 0.1


def until(find: Callable[[], T], seconds: float, seen: Callable[[], object] = lambda: "") -> T:
    """Return the first true value that `find` returns. Raises AssertionError after that many seconds.

    seen: returns what the error shows.
    """
    end = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < end, f"not within {seconds} s: {seen()}"
        time.sleep(PAUSE_SECONDS)
    return found
