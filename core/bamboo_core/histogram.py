"""An immutable histogram, and the bucket bounds of metrics. Standard library only."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

Buckets = tuple[float, ...]  # upper bounds, ascending; one more bucket takes larger values

# Bucket bounds in seconds: for steps, for writing a checkpoint, and for the time that a checkpoint delays training
STEP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
DURATIONS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
STALLS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Histogram:
    """An immutable histogram: `counts` of values by bucket (one more than `bounds`), and the sum of all values."""

    bounds: Buckets
    counts: tuple[int, ...]
    total: float = 0.0

    @classmethod
    def of(cls, bounds: Buckets, values: Iterable[float] = ()) -> "Histogram":
        """Return the histogram of these values."""
        histogram = cls(bounds, (0,) * (len(bounds) + 1))
        for value in values:
            histogram = histogram.having(value)
        return histogram

    @property
    def count(self) -> int:
        return sum(self.counts)

    def having(self, value: float) -> "Histogram":
        """Return the histogram with one more value."""
        place = bisect_left(self.bounds, value)
        counts = (*self.counts[:place], self.counts[place] + 1, *self.counts[place + 1 :])
        return replace(self, counts=counts, total=self.total + value)

    def cumulative(self) -> list[tuple[str, int]]:
        """Return each bucket's bound and the number of values up to it, as Prometheus writes them."""
        return list(zip([*map(str, self.bounds), "+Inf"], accumulate(self.counts), strict=True))
