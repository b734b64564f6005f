"""Layers split over stages whose workers differ in speed, and the time of a step with a split. Pure."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Final

Ranges = tuple[tuple[int, int], ...]

MOST_WEIGHED_LAYERS: Final = 500  # a larger model keeps the split of its counted costs


def uneven_split(costs: Sequence[float], slowness: Sequence[float], fixed: Sequence[float] = ()) -> Ranges:
    """Return contiguous, non-empty layer ranges, one for each stage, that minimise the longest stage's time.

    costs: of each layer, finite and not negative. slowness: of each stage's worker, above 0; a stage takes the sum of
    its layers' costs times that. fixed: added to that sum for each stage. Among these splits it returns one whose
    stages differ least (least sum of squares). Exact: filling a slow stage last would not do, since it matters whether
    it can hold the layer at its place. Raises ValueError if there are fewer layers than stages.
    """
    if len(costs) < len(slowness):
        raise ValueError(f"expected at least {len(slowness)} layers, got {len(costs)}")
    total = list(accumulate(costs, initial=0.0))
    stages = list(zip(slowness, fixed or [0.0] * len(slowness), strict=True))
    return _most_even(total, stages, _shortest(total, stages))


Stages = Sequence[tuple[float, float]]  # slowness and fixed cost


def _shortest(total: Sequence[float], workers: Stages) -> float:
    """Return the least possible time of the longest stage. total: the cost of the layers before each one."""
    layers, stages = len(total) - 1, len(workers)
    best = [0.0] + [inf] * layers  # the longest of the stages so far, by the number of layers they hold
    for stage, (factor, fixed) in enumerate(workers):
        longest = [inf] * (layers + 1)
        for end in range(stage + 1, layers - (stages - stage - 1) + 1):
            for start in range(end - 1, stage - 1, -1):
                seconds = factor * (fixed + total[end] - total[start])
                if seconds >= longest[end]:
                    break  # and with more layers it takes no less
                longest[end] = min(longest[end], max(best[start], seconds))
        best = longest
    return best[-1]


def _most_even(total: Sequence[float], workers: Stages, limit: float) -> Ranges:
    """Return the split with the least sum of squares among those whose stages all stay within the limit."""
    layers, stages = len(total) - 1, len(workers)
    unit = limit or 1.0  # avoids infinite squares of large numbers
    best = [0.0] + [inf] * layers
    starts: list[list[int]] = []
    for stage, (factor, fixed) in enumerate(workers):
        least, begins = [inf] * (layers + 1), [-1] * (layers + 1)
        for end in range(stage + 1, layers - (stages - stage - 1) + 1):
            for start in range(end - 1, stage - 1, -1):
                seconds = factor * (fixed + total[end] - total[start])
                if seconds > limit:
                    break
                squares = best[start] + (seconds / unit) ** 2
                if squares < least[end]:
                    least[end], begins[end] = squares, start
        best = least
        starts.append(begins)
    bounds = [layers]
    for begins in reversed(starts):
        bounds.append(begins[bounds[-1]])
    return tuple(pairwise(reversed(bounds)))


def step_seconds(seconds: Sequence[Sequence[float]], microbatches: Sequence[int], devices: int = 1) -> float:
    """Return the computing time of a step: the first microbatch passes all stages, each further one waits for the
    longest.

    Transfers count nothing. seconds: of a microbatch's forward and backward, [pipeline][stage]. microbatches: of each
    pipeline. devices: the number that a stage's layers are divided among, about evenly.
    """
    rows = zip(seconds, microbatches, strict=True)
    return max(sum(row) + (count - 1) * max(row) / devices for row, count in rows)
