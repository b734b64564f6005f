"""The clock of a shell that may be stopped (Ctrl-Z, SIGSTOP, a suspended machine)."""

import time
from collections.abc import Callable

LONGEST_STEP_SECONDS = 0.25


class AwakeClock:
    """A monotonic clock in seconds that advances by at most LONGEST_STEP_SECONDS from one reading to the next.

    A shell reads it many times a second, so it leaves out the time in which this process stood still, and the
    coordinator does not declare workers lost that it could not hear.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read = self._now = clock()

    def __call__(self) -> float:
        real = self._clock()
        self._now += min(real - self._read, LONGEST_STEP_SECONDS)
        self._read = real
        return self._now
