"""Speeds: which workers are slow, separated from which layers are much work. Pure.

The model: a worker takes (its slowness) x (the seconds of its layers) for a microbatch. Two workers that ran the same
layers differ by their slowness, whatever the layers are. One worker that ran different layers shows by how much these
differ. So each measurement ties a worker to some layers, and workers that are tied to each other, even through others,
are comparable. In logarithms that is a sum, and least squares give both: for parallel pipelines each one's slowness,
and for a ring, in which each worker also times the next one's layers, the slowness of all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median, median_low
from typing import Final, NamedTuple

from bamboo_core.planning.plan import WorkerId

Layers = tuple[int, int]  # a half-open range

_MOST_ROUNDS: Final = 500  # of conjugate gradients; they converge long before
_PRECISION: Final = 1e-12


class Measurement(NamedTuple):
    """A worker's usual seconds for a microbatch's forward and backward of these layers, above 0."""

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
        """Return the time of each stage that does not depend on its layers."""
        first, last = self.reading
        return [first * (s == 0) + last * (s == stages - 1) for s in range(stages)]


@dataclass(frozen=True, slots=True)
class Speeds:
    """The slowness of workers, compared with others that do the same."""

    # of each worker; the median of comparable workers is 1, of two the faster one, since faults make workers slower
    slowness: Mapping[WorkerId, float]
    seconds: Mapping[Layers, float]  # of layers, for a worker of slowness 1
    # the workers that each worker can be compared with; may be empty
    others: Mapping[WorkerId, tuple[WorkerId, ...]]

    def excess(self, worker: WorkerId) -> float | None:
        """Return how many times slower a worker is than the median of the others; None if it cannot be compared."""
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
    """Yield the unknowns in groups that are tied to each other, in order."""
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
    """Solve for the unknowns by least squares, with conjugate gradients: exact after one round per unknown, but for
    rounding.
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
