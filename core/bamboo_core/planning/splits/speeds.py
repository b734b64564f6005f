"""Estimates of workers' speeds, separate from the costs of layers, and splits of layers by both. Pure.

The model: a worker takes (its slowness) x (the seconds of its layers) for a microbatch. Two workers that ran the same
layers show the ratio of their slowness. One worker that ran different layers shows the ratio of their seconds. So each
measurement ties a worker to some layers, and workers with a direct or indirect tie are comparable. In logarithms the
product is a sum, so least squares give both factors. Parallel pipelines make the owners of one stage comparable. With
replicas in a ring, each worker also times the next stage's layers: all workers are comparable.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import exp, inf, log
from statistics import median, median_low
from typing import Annotated, Final, NamedTuple

import msgspec

from bamboo_core.checkpoint.layout import MOST_LAYERS
from bamboo_core.planning.plan import WorkerId

MOST_TIMES = 64  # stages in one worker's report
LEAST_MICROBATCHES = 8  # of a stage, below which its times do not count
MOST_MICROBATCHES = 32  # over which a worker takes the median
Layer = Annotated[int, msgspec.Meta(ge=0, le=MOST_LAYERS)]
Taken = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class StageTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's seconds for a stage: medians of the newest microbatches, without waits and repetitions."""

    layers: tuple[Layer, Layer]  # the stage's, half-open
    # forward, backward: of a whole microbatch; 0 if the worker has not timed both, as for a replicated stage
    forward: Taken = 0.0
    backward: Taken = 0.0
    # the forward of each layer by itself; empty if unknown
    each: Annotated[tuple[Taken, ...], msgspec.Meta(max_length=MOST_LAYERS)] = ()
    # how many were measured, up to the number that is kept
    microbatches: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0


def forward_share(times: Iterable[StageTimes]) -> float | None:
    """Return the share of forwards in all computing seconds, from entries with both times; None if there are none."""
    both = [(one.forward, one.backward) for one in times if one.forward > 0 and one.backward > 0]
    forward, backward = (sum(seconds) for seconds in zip(*both, strict=True)) if both else (0.0, 0.0)
    return forward / (forward + backward) if both else None


Ranges = tuple[tuple[int, int], ...]

MOST_WEIGHED_LAYERS: Final = 500  # a larger model keeps the split of its counted costs


def uneven_split(costs: Sequence[float], slowness: Sequence[float], fixed: Sequence[float] = ()) -> Ranges:
    """Return contiguous, non-empty layer ranges, one for each stage, that minimise the longest stage's time.

    costs: the cost of each layer, finite and not negative. slowness: a factor above 0 for each stage's worker. fixed:
    an extra cost of each stage; empty: none. A stage takes slowness x (fixed + the costs of its layers). Among the best
    splits it returns the one with the least sum of the stages' squared times. The search is exact, because greedy
    filling may leave a slow stage a layer that is too long for it. There must be at least as many layers as stages.
    """
    total = list(accumulate(costs, initial=0.0))
    stages = list(zip(slowness, fixed or [0.0] * len(slowness), strict=True))
    return _most_even(total, stages, _shortest(total, stages))


Stages = Sequence[tuple[float, float]]  # slowness and fixed cost


def _shortest(total: Sequence[float], workers: Stages) -> float:
    """Return the least possible time of the longest stage. total: prefix sums of the layers' costs."""
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
    """Return the split with the least sum of squares among the splits in which no stage exceeds the limit."""
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
    """Return the computing seconds of a step's slowest pipeline, without transfers.

    The first microbatch passes all stages; each further one adds the time of one device of the longest stage. seconds:
    of a microbatch's forward and backward, [pipeline][stage]. microbatches: their number in each pipeline. devices: how
    many devices share a stage's layers, about evenly.
    """
    rows = zip(seconds, microbatches, strict=True)
    return max(sum(row) + (count - 1) * max(row) / devices for row, count in rows)


Layers = tuple[int, int]  # a half-open range

_MOST_ROUNDS: Final = 500  # of conjugate gradients; they converge long before
_PRECISION: Final = 1e-12


class Measurement(NamedTuple):
    """A worker's usual time for a microbatch's forward and backward through these layers: more than 0 seconds."""

    worker: WorkerId
    layers: Layers
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkEstimate:
    """The cost of layers and the slowness of workers."""

    costs: tuple[float, ...]  # of each layer, counted or in seconds
    slowness: Mapping[WorkerId, float] = field(default_factory=dict)  # of workers; 1 if unknown
    reading: tuple[float, float] = (0.0, 0.0)  # the extra time of the first and the last stage, for their data

    def fixed(self, stages: int) -> list[float]:
        """Return, for each stage, the part of its time that does not depend on its layers."""
        first, last = self.reading
        return [first * (s == 0) + last * (s == stages - 1) for s in range(stages)]


@dataclass(frozen=True, slots=True)
class Speeds:
    """The slowness of workers, by comparison with workers that ran the same layers."""

    # of each worker, relative to the lower median of comparable workers, itself included: faults only slow workers down
    slowness: Mapping[WorkerId, float]
    seconds: Mapping[Layers, float]  # of layers, for a worker of slowness 1
    # the workers that each worker can be compared with; may be empty
    others: Mapping[WorkerId, tuple[WorkerId, ...]]

    def excess(self, worker: WorkerId) -> float | None:
        """Return the worker's slowness divided by the median of comparable workers; None if no worker is comparable."""
        others = [self.slowness[other] for other in self.others.get(worker, ())]
        return self.slowness[worker] / median(others) if others else None


def speeds(measured: Sequence[Measurement]) -> Speeds:
    """Estimate the slowness of workers from measurements. A worker that cannot be compared has slowness 1: all its time
    is attributed to its layers.
    """
    workers = list(dict.fromkeys(m.worker for m in measured))
    layers = list(dict.fromkeys(m.layers for m in measured))
    number = {worker: i for i, worker in enumerate(workers)}
    behind = {one: len(workers) + i for i, one in enumerate(layers)}
    ties = [(number[m.worker], behind[m.layers], log(m.seconds)) for m in measured]
    unknowns = len(workers) + len(layers)
    potentials = _potentials(unknowns, ties)
    slowness, seconds, others = {}, {}, {}
    for group in _connected(unknowns, ties):
        mine = [workers[i] for i in group if i < len(workers)]
        middle = median_low(potentials[number[w]] for w in mine)
        slowness.update({w: exp(potentials[number[w]] - middle) for w in mine})
        seconds.update({layers[i - len(workers)]: exp(middle - potentials[i]) for i in group if i >= len(workers)})
        others.update({w: tuple(o for o in mine if o != w) for w in mine})
    return Speeds(slowness, seconds, others)


Tie = tuple[int, int, float]  # two unknowns, and the first one's potential minus the second one's


def _connected(unknowns: int, ties: Sequence[Tie]) -> Iterator[list[int]]:
    """Yield the connected components of the graph of ties, each as a sorted list of unknowns."""
    near: list[list[int]] = [[] for _ in range(unknowns)]
    for a, b, _ in ties:
        near[a].append(b)
        near[b].append(a)
    seen = [False] * unknowns
    for first in range(unknowns):
        group, new = [], [first] if not seen[first] else []
        while new:
            one = new.pop()
            if not seen[one]:
                seen[one] = True
                group.append(one)
                new += near[one]
        if group:
            yield sorted(group)


def _potentials(unknowns: int, ties: Sequence[Tie]) -> list[float]:
    """Return the unknowns' potentials that fit the ties best, by least squares with conjugate gradients. Apart from
    rounding, the result is exact after one round per unknown, but there are at most _MOST_ROUNDS.
    """
    potentials, residue = [0.0] * unknowns, _divergence(unknowns, ties)
    direction, size = list(residue), sum(r * r for r in residue)
    enough = _PRECISION**2 * max(size, 1.0)
    for _ in range(min(_MOST_ROUNDS, 4 * unknowns)):
        if size <= enough:
            break
        pull = _divergence(unknowns, [(a, b, direction[a] - direction[b]) for a, b, _ in ties])
        length = size / sum(d * p for d, p in zip(direction, pull, strict=True))
        potentials = [f + length * d for f, d in zip(potentials, direction, strict=True)]
        residue = [r - length * p for r, p in zip(residue, pull, strict=True)]
        before, size = size, sum(r * r for r in residue)
        direction = [r + size / before * d for r, d in zip(residue, direction, strict=True)]
    return potentials


def _divergence(unknowns: int, flows: Sequence[Tie]) -> list[float]:
    at = [0.0] * unknowns
    for a, b, flow in flows:
        at[a] += flow
        at[b] -= flow
    return at
