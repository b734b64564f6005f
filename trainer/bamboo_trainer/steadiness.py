"""The decision when to stop measuring: when the median is known well enough, or after enough time. Pure."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

FEWEST: Final = 5  # times; nothing is known from fewer
NOTCH: Final = 1.57  # times the quartiles' distance over the root of their number: where a median is (McGill, 1978)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steadiness:
    """The precision to which a median must be known."""

    bound: float = 0.03  # by what share of itself a median may be off
    floor: float = 20e-6  # seconds that do not matter
    most: int = 100  # times at most

    def reached(self, kinds: Sequence[Sequence[float]]) -> bool:
        """Return whether all medians are known well enough. kinds: seconds of each measured thing, equally many."""
        return all(self._known(times) for times in kinds)

    def enough(self, kinds: Sequence[Sequence[float]], left: float) -> bool:
        """Return whether to stop measuring. left: seconds left for it."""
        return self.reached(kinds) or len(kinds[0]) >= self.most or left <= 0

    def _known(self, times: Sequence[float]) -> bool:
        off = spread(times)
        return off <= self.bound or off * statistics.median(times) <= self.floor


def spread(times: Sequence[float]) -> float:
    """Return the share of itself by which the median of these times may be off; infinite if too few, or all zero."""
    if len(times) < FEWEST:
        return math.inf
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return NOTCH * (high - low) / math.sqrt(len(times)) / median if median > 0 else math.inf
