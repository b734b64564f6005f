"""Virtual time: a queue of actions, ordered by time and then by when they were planned."""

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class Clock:
    """A clock in virtual time, which jumps from one action to the next. now: seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def at(self, when: float, action: Action) -> None:
        heapq.heappush(self._queue, (max(when, self.now), next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def advance(self) -> bool:
        """Run the next action. Return False if the queue is empty."""
        if not self._queue:
            return False
        self.now, _, action = heapq.heappop(self._queue)
        action()
        return True
