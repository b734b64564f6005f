"""A histogram of plain numbers. Standard library only."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

STEP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)  # bounds for steps


class Histogram:
    """A histogram. One thread observes; any thread may read, and misses at most the newest observation."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float], values: Iterable[float] = ()) -> None:
        """Create a histogram. bounds: upper bounds, rising; one more bucket takes larger values."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        for value in values:
            self.observe(value)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, int]]:
    """Return each bucket's bound and the number of values up to it, as Prometheus writes them."""
    buckets, sum_so_far = [], 0
    for bound, count in zip([*map(str, bounds), "+Inf"], list(counts), strict=True):
        sum_so_far += count
        buckets.append((bound, sum_so_far))
    return buckets
