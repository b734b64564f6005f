"""Whether workers are being taken away right now: while they are, the decisions of all jobs come first.

In a burst a cloud takes many nodes at once. What follows from a job's new plan (pods, status, events) is a dozen calls
of the API server for each job, and they would hold up the notices that are still on their way.
"""

import asyncio
import math
import time

CALM_SECONDS = 0.3  # without a new one: the burst is over
LONGEST_SECONDS = 2.0  # of a burst; what lasts longer is how things are, and holds up nothing


class Burst:
    """Begun and prolonged by `noticed`; one for all jobs of an operator."""

    def __init__(self) -> None:
        self._since = self._last = -math.inf  # time.monotonic()

    def noticed(self) -> None:
        """A job has lost a worker, or will, and has its plan without it."""
        now = time.monotonic()
        if now - self._last > CALM_SECONDS:
            self._since = now
        self._last = now

    async def wait_for_its_end(self) -> None:
        """Returns at once if there is none."""
        while (left := min(self._last + CALM_SECONDS, self._since + LONGEST_SECONDS) - time.monotonic()) > 0:
            await asyncio.sleep(left)
