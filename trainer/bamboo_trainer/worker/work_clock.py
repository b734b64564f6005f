"""A clock of a worker's work, which stands still while its thread waits for a processor.

The coordinator compares workers' times for layers. On a machine with more processes than processors, a process
sometimes waits longer than a small layer takes, which says nothing about the worker's speed: a replacement would wait
as long. Sleeping, waiting for data or for a device, and a slow processor count as usual.
"""

import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")  # of Linux: nanoseconds run, nanoseconds waited, times run
MOST_BYTES: Final = 128


class WorkClock:
    """A clock that returns the seconds of `clock` minus its thread's waits for a processor (Linux's schedstat).

    It never goes back, even if the thread waits between the readings of `clock` and of schedstat. Only the thread that
    creates it may read it. Without schedstat it is `clock`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, account: Path = SCHEDSTAT) -> None:
        self._clock, self._thread = clock, threading.get_ident()
        self._newest = -math.inf  # the last reading
        try:
            self._account: int | None = os.open(account, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._account = None  # another system, or a kernel without CONFIG_SCHED_INFO
        else:
            weakref.finalize(self, os.close, self._account)

    def __call__(self) -> float:
        assert threading.get_ident() == self._thread, "the account is of the thread that made the clock"
        self._newest = max(self._newest, self._clock() - self._waited())
        return self._newest

    def _waited(self) -> float:
        """Return the seconds that the thread has waited for a processor since its start."""
        if self._account is None:
            return 0.0
        return int(os.pread(self._account, MOST_BYTES, 0).split()[1]) * 1e-9
