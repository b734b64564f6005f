"""How long one measure has to wait for the next: ever longer if they do not last, and shorter again once one has. Pure.

So speeds that change all the time are not chased, and a job whose node is slow once a day is helped each time.
"""

from dataclasses import dataclass, replace
from typing import Final

GROWTH: Final = 4.0  # of the wait after a measure that did not last
LASTING: Final = 10.0  # shortest waits for which a measure must have been enough, for the next wait to be shorter
MOST_LEVELS: Final = 8


@dataclass(frozen=True, slots=True)
class Backoff:
    """A wait between two measures, which grows while measures do not last.

    In any time T, in shortest waits, there are at most 2 + log(T) / log(GROWTH) + 2 T / LASTING measures, whatever asks
    for them: a wait becomes shorter only after one that lasted.
    """

    level: int = 0  # the wait is the shortest one times GROWTH to that power
    acted_at: float | None = None  # seconds, of the newest measure
    wanted_at: float | None = None  # when another one was last wanted after it
    longest: float = 0.0  # the longest time without that

    def wanted(self, now: float) -> "Backoff":
        """The backoff when another measure would be of use now."""
        return replace(self, wanted_at=now, longest=self._longest(now))

    def is_over(self, shortest: float, now: float) -> bool:
        """Whether another measure may be taken. shortest: seconds from one measure to the next, at least."""
        return self.acted_at is None or now - self.acted_at >= shortest * GROWTH**self.level

    def after(self, shortest: float, now: float) -> "Backoff":
        """The backoff once something is done now."""
        if self.acted_at is None:
            return Backoff(self.level, now)
        enough = self._longest(now) >= LASTING * shortest
        return Backoff(max(0, self.level - 1) if enough else min(self.level + 1, MOST_LEVELS), now)

    def _longest(self, now: float) -> float:
        since = self.acted_at if self.wanted_at is None else self.wanted_at
        return 0.0 if since is None else max(self.longest, now - since)
