"""What workers and layers take, told apart: who is slow, and which layers are more work than others. Pure.

The model: a worker takes (its slowness) x (the seconds of its layers) for a microbatch. Two workers that ran the same
layers differ by their slowness, whatever the layers are. One worker that ran different layers tells what these differ
by. So each measurement ties a worker to some layers, and those who are tied to each other, if only through others, are
comparable. In logarithms that is a sum, and least squares give both: in pipelines side by side each one's slowness, and
in a ring, in which each worker times the next one's layers, too, the slowness of all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median, median_low
from typing import Final, NamedTuple

from bamboo_core.planning.plan import WorkerId

Layers = tuple[int, int]  # a half-open range

_MOST_ROUNDS: Final = 500  # of the conjugate gradients; they end by themselves long before
_PRECISION: Final = 1e-12


class Measurement(NamedTuple):
    """A worker's usual seconds for a microbatch's forward and backward of these layers, above 0."""

    worker: WorkerId
    layers: Layers
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkEstimate:
    """What layers and workers take."""

    costs: tuple[float, ...]  # of each layer, counted or in seconds
    slowness: Mapping[WorkerId, float] = field(default_factory=dict)  # of workers; 1 if unknown
    reading: tuple[float, float] = (0.0, 0.0)  # what the first stage and the last one take on top, for their data

    def fixed(self, stages: int) -> list[float]:
        """What does not depend on its layers, of each stage."""
        first, last = self.reading
        return [first * (s == 0) + last * (s == stages - 1) for s in range(stages)]


@dataclass(frozen=True, slots=True)
class Speeds:
    """How slow workers are beside others that do the same."""

    # of each worker; the median of those who are comparable is 1, the faster one's if there are two, since what goes
    # wrong makes workers slower
    slowness: Mapping[WorkerId, float]
    seconds: Mapping[Layers, float]  # of layers, for such a worker
    # by worker, those whom it can be compared with; empty if there is nobody
    others: Mapping[WorkerId, tuple[WorkerId, ...]]

    def excess(self, worker: WorkerId) -> float | None:
        """The factor by which a worker is slower than the median of the others; None if there is nobody to compare it
        with.
        """
        others = [self.slowness[other] for other in self.others.get(worker, ())]
        return self.slowness[worker] / median(others) if others else None


def speeds(measured: Sequence[Measurement]) -> Speeds:
    """How slow workers are, by what was measured. A worker that nobody can be compared with has slowness 1: all that it
    takes is put down to its layers.
    """
    workers = list(dict.fromkeys(m.worker for m in measured))
    layers = list(dict.fromkeys(m.layers for m in measured))
    number = {worker: i for i, worker in enumerate(workers)}
    behind = {one: len(workers) + i for i, one in enumerate(layers)}
    ties = [(number[m.worker], behind[m.layers], log(m.seconds)) for m in measured]
    unknowns = len(workers) + len(layers)
    found = _potentials(unknowns, ties)
    slowness, seconds, others = {}, {}, {}
    for group in _connected(unknowns, ties):
        mine = [workers[i] for i in group if i < len(workers)]
        middle = median_low(found[number[w]] for w in mine)
        slowness.update({w: exp(found[number[w]] - middle) for w in mine})
        seconds.update({layers[i - len(workers)]: exp(middle - found[i]) for i in group if i >= len(workers)})
        others.update({w: tuple(o for o in mine if o != w) for w in mine})
    return Speeds(slowness, seconds, others)


Tie = tuple[int, int, float]  # two unknowns, and by how much the first one's potential is above the second one's


def _connected(unknowns: int, ties: Sequence[Tie]) -> Iterator[list[int]]:
    """The unknowns in groups that are tied to each other, in order."""
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
    """The unknowns by least squares, with conjugate gradients: exact after as many rounds as there are
    unknowns, but for rounding.
    """
    found, residue = [0.0] * unknowns, _divergence(unknowns, ties)
    direction, size = list(residue), sum(r * r for r in residue)
    enough = _PRECISION**2 * max(size, 1.0)
    for _ in range(min(_MOST_ROUNDS, 4 * unknowns)):
        if size <= enough:
            break
        pull = _divergence(unknowns, [(a, b, direction[a] - direction[b]) for a, b, _ in ties])
        length = size / sum(d * p for d, p in zip(direction, pull, strict=True))
        found = [f + length * d for f, d in zip(found, direction, strict=True)]
        residue = [r - length * p for r, p in zip(residue, pull, strict=True)]
        before, size = size, sum(r * r for r in residue)
        direction = [r + size / before * d for r, d in zip(residue, direction, strict=True)]
    return found


def _divergence(unknowns: int, flows: Sequence[Tie]) -> list[float]:
    at = [0.0] * unknowns
    for a, b, flow in flows:
        at[a] += flow
        at[b] -= flow
    return at
