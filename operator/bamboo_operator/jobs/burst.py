"""Detection of a burst of preemptions, in which the new plans of all jobs come first.

In a burst a cloud takes many nodes at once. A job's new plan causes a dozen API calls (pods, status, events), which
would delay notices still to come.
"""

import asyncio
import math
import time

CALM_SECONDS = 0.3  # without a preemption, after which the burst is over
LONGEST_SECONDS = 2.0  # of a burst; longer waves delay nothing


class Burst:
    """The burst in progress, for all jobs of an operator."""

    def __init__(self) -> None:
        self._since = self._last = -math.inf  # time.monotonic()

    def noticed(self) -> None:
        """Begin or prolong the burst: a job has lost, or will lose, a worker and has its new plan."""
        now = time.monotonic()
        if now - self._last > CALM_SECONDS:
            self._since = now
        self._last = now

    async def wait_for_its_end(self) -> None:
        """Wait until the burst is over; return at once without one."""
        while (left := min(self._last + CALM_SECONDS, self._since + LONGEST_SECONDS) - time.monotonic()) > 0:
            await asyncio.sleep(left)
