"""A clock for a process that runs a coordinator and may be suspended (Ctrl-Z, SIGSTOP, a machine that sleeps)."""

import time
from collections.abc import Callable

LONGEST_STEP_SECONDS = 0.25


class AwakeClock:
    """A monotonic clock, in seconds, that almost stands still while the process is suspended.

    It advances by at most LONGEST_STEP_SECONDS from one reading to the next; a running process must read it more often.
    So the coordinator does not declare workers lost only because it could not hear them while it was suspended.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read = self._now = clock()

    def __call__(self) -> float:
        real = self._clock()
        self._now += min(real - self._read, LONGEST_STEP_SECONDS)
        self._read = real
        return self._now
