"""Layers split over stages whose workers differ in speed, and what a step takes with a split. Pure."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Final

Ranges = tuple[tuple[int, int], ...]

MOST_WEIGHED_LAYERS: Final = 500  # a model with more keeps the split that its counted costs give


def uneven_split(costs: Sequence[float], slowness: Sequence[float], fixed: Sequence[float] = ()) -> Ranges:
    """Contiguous layer ranges, one for each stage and none empty, that minimise the longest stage's time.

    costs: of each layer, finite and not negative. slowness: of each stage's worker, above 0: a stage takes the sum of
    its layers' costs, times that. fixed: what comes on top of that sum for each stage, whatever its layers are. Of the
    splits that do so it is one whose stages differ least (least sum of squares). Exact. A stage that is twice as slow
    cannot just be filled last: whether it can hold the layer at its place matters.
    Raises ValueError if there are fewer layers than stages.
    """
    if len(costs) < len(slowness):
        raise ValueError(f"expected at least {len(slowness)} layers, got {len(costs)}")
    total = list(accumulate(costs, initial=0.0))
    stages = list(zip(slowness, fixed or [0.0] * len(slowness), strict=True))
    return _most_even(total, stages, _shortest(total, stages))


Stages = Sequence[tuple[float, float]]  # slowness, and what is fixed


def _shortest(total: Sequence[float], workers: Stages) -> float:
    """What the longest stage takes at least. total: of the layers before each one."""
    layers, stages = len(total) - 1, len(workers)
    best = [0.0] + [inf] * layers  # of the stages so far, for the layers before that one
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
    """The split with the least sum of squares, of those in which no stage takes longer than the limit."""
    layers, stages = len(total) - 1, len(workers)
    unit = limit or 1.0  # squares of large numbers would be infinite
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
    """What the computing of a step takes, as the schedule has it: the first microbatch goes through all stages, and
    each further one waits for the longest of them. Transfers count nothing.

    seconds: of a microbatch's forward and backward, [pipeline][stage]. microbatches: of each pipeline. devices: among
    which a stage's layers are divided, about evenly.
    """
    rows = zip(seconds, microbatches, strict=True)
    return max(sum(row) + (count - 1) * max(row) / devices for row, count in rows)
