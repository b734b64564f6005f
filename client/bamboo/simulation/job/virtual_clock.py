"""A clock of virtual time, which runs scheduled actions in order."""

import heapq
import math
from collections.abc import Callable

Action = Callable[[], None]


class Timer:
    """A scheduled action that can be cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        self.action = None


class VirtualClock:
    """A clock in seconds. Actions at the same moment run in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Timer]] = []
        self._count = 0

    def at(self, moment: float, action: Action) -> Timer:
        """Schedule an action at a moment, or now if the moment is past."""
        self._count += 1
        timer = Timer(action)
        heapq.heappush(self._queue, (max(moment, self.now), self._count, timer))
        return timer

    def after(self, seconds: float, action: Action) -> Timer:
        return self.at(self.now + seconds, action)

    @property
    def next(self) -> float:
        """The time of the next action in seconds; infinite if there is none."""
        while self._queue and self._queue[0][2].action is None:
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else math.inf

    def advance(self) -> bool:
        """Set the clock to the next action's time and run it. Return False if there is none."""
        while self._queue:
            moment, _, timer = heapq.heappop(self._queue)
            if timer.action is not None:
                self.now = moment
                timer.action()
                return True
        return False
