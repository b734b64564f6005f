"""How many values of a kind there were, and how large they were: what a histogram is filled from."""

from bisect import bisect_left
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Distribution:
    """bounds: upper ones, rising. counts: of the values up to each, and one more for those above. total: their sum."""

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
        """With one value more."""
        place = bisect_left(self.bounds, value)
        counts = (*self.counts[:place], self.counts[place] + 1, *self.counts[place + 1 :])
        return replace(self, counts=counts, total=self.total + value)
