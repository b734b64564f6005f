"""Counts of values by size, from which a histogram metric is filled."""

from bisect import bisect_left
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Distribution:
    """Counts of values between bounds.

    bounds: upper bounds, ascending. counts: number of values up to each bound, and of those above the last. total: the
    sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> "Distribution":
        return cls(bounds, (0,) * (len(bounds) + 1))

    @property
    def count(self) -> int:
        return sum(self.counts)

    def having(self, value: float) -> "Distribution":
        """Return the distribution with one more value."""
        place = bisect_left(self.bounds, value)
        counts = (*self.counts[:place], self.counts[place] + 1, *self.counts[place + 1 :])
        return replace(self, counts=counts, total=self.total + value)
