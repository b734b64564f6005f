"""The computation of a simulated job, on exact integers, and an oracle that returns the expected result.

A layer's result is a hash of all its inputs, so a contribution that is lost, doubled, stale or from another microbatch
changes every later result. Within a group, the accumulated gradient depends on the order of the microbatches:
g = (g * FACTOR + h) mod PRIME. Sums over groups, and over the layers that share a parameter, are in float32 as in the
product. One group's sum is exact; sums over several groups are rounded, so they depend on the order of the additions.
"""

import math
from collections.abc import Sequence
from ctypes import c_float
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise, product
from typing import Any

from bamboo_core.planning.gradient_groups import group_bounds
from bamboo_trainer.tasks.evaluation import EvaluationSchedule

FACTOR = 31
PRIME = 16_777_213  # below 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """A simulated job's layers, steps and microbatches, and the arithmetic on them."""

    seed: int
    stages: int
    pipelines: int
    microbatches: int
    steps: int
    sizes: tuple[int, ...]  # elements of each layer's gradient
    ties: tuple[tuple[int, ...], ...] = ()  # layers that share their first element; a stage then has one per device
    groups: int  # of microbatches
    skipped: frozenset[int] = frozenset()  # steps whose loss is not finite
    evaluated: tuple[int, int] = (0, 0)  # (steps between evaluations, batches); (0, 0): never
    left_out: int = 0  # steps that an early stop saves; `steps` are those before it
    by_decision: bool = False  # the early stop is by a decision of the task, not by an evaluation

    @property
    def wanted_steps(self) -> int:
        """The number of steps in the manifest."""
        return self.steps + self.left_out

    @property
    def layers(self) -> int:
        return len(self.sizes)

    @property
    def bounds(self) -> tuple[int, ...]:
        """The first microbatch of each group, and, last, the number of microbatches."""
        return group_bounds(self.microbatches, self.groups)

    def training(self) -> dict[str, Any]:
        """Return the manifest's `training` section."""
        training: dict[str, Any] = {
            "steps": self.wanted_steps,
            "globalBatchSize": self.microbatches,
            "microBatchSize": 1,
            "gradientGroups": self.groups,
        }
        if self.skipped:
            training |= {"nonFinite": "Skip"}
        if self.evaluations:
            training |= {"evaluation": {"everySteps": self.evaluated[0]}}
        return training

    @property
    def evaluations(self) -> EvaluationSchedule | None:
        every, batches = self.evaluated
        return EvaluationSchedule(every_steps=every, batches=batches, steps=self.wanted_steps) if every else None

    def evaluate(self, state: int, layer: int, batch: int, given: int) -> int:
        return hash((state, 9, layer, batch, given))

    def initial(self, layer: int) -> int:
        return hash((self.seed, 1, layer))

    def forward(self, state: int, layer: int, step: int, microbatch: int, given: int) -> int:
        return hash((state, 2, layer, step, microbatch, given))

    def weight(self, microbatch: int) -> float:
        """Return the weight of a microbatch's loss; with odd seeds losses are means, and all weights are 1."""
        return float(1 + microbatch % 3) if self.seed % 2 == 0 else 1.0

    @property
    def scale(self) -> float:
        """The factor by which a step's summed gradients are scaled."""
        return 1 / self.whole if self.seed % 2 == 0 else 1.0

    @property
    def whole(self) -> float:
        """The sum of the weights of a step's microbatches."""
        return sum(self.weight(m) for m in range(self.microbatches))

    def added(self, layer: int, step: int, microbatch: int, given: int) -> float:
        """Return the auxiliary loss of a layer, which is added to the loss of a microbatch."""
        return hash((9, layer, step, microbatch, given)) % 1_000_003 / 1024

    def loss(self, output: int, step: int, microbatch: int) -> float:
        """Return the loss of a microbatch; in a skipped step the last microbatch's loss is not finite."""
        if step in self.skipped and microbatch == self.microbatches - 1:
            return math.inf
        return float(output % 1_000_003)

    def backward(self, state: int, place: tuple[int, int, int], given: int, gradient: int) -> tuple[int, list[int]]:
        """Return the gradients of a layer's input and of its parameters. place: layer, step, microbatch."""
        seed = hash((state, 3, *place, given, gradient))
        return hash((seed, 4)), [hash((seed, 5, i)) % PRIME for i in range(self.sizes[place[0]])]

    def accumulate(self, so_far: Sequence[int], new: Sequence[int]) -> list[int]:
        return [(a * FACTOR + b) % PRIME for a, b in zip(so_far, new, strict=True)]

    def squared_norms(self, layer: int, gradient: Sequence[int]) -> list[float]:
        elsewhere = any(layer in tie and layer != min(tie) for tie in self.ties)
        return [float(g * g) for g in (gradient[1:] if elsewhere else gradient)]

    def applied(self, state: int, version: int, gradient: Sequence[float], norm: float) -> int:
        return hash((state, 6, version, norm, *(int(g) for g in gradient)))

    def remembered(self, told: int, loss: float | None) -> int:
        """Return the memory of the task's decisions after a step. told: the memory before. loss: None if not finite."""
        return hash((10, told, loss or 0.0)) % 1_000_003

    def digest(self, state: int, version: int) -> str:
        return f"{state & (2**64 - 1):048x}{version:016x}"


def measured(value: int, batch: int) -> tuple[float, float]:
    """Return the sum and weight of an evaluation's metric, for the last layer's output on a batch."""
    return value % 1_000_003 / 7, batch + 1.0


@dataclass
class Oracle:
    """The expected results of an undisturbed run, computed without engines, plans or messages."""

    arithmetic: Arithmetic
    inputs: dict[tuple[int, int, int], int] = field(default_factory=dict)  # layer, step, microbatch
    gradients: dict[tuple[int, int, int], int] = field(default_factory=dict)  # of a layer's outputs
    finals: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # layer, step
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    added: list[float] = field(default_factory=list)  # the part of each step's loss that layers add
    states: list[list[int]] = field(default_factory=list)  # [version][layer]
    told: list[int] = field(default_factory=lambda: [0])  # by version: what decisions remember

    def __post_init__(self) -> None:
        self.states.append([self.arithmetic.initial(s) for s in range(self.arithmetic.layers)])
        for step in range(self.arithmetic.steps):
            self._step(step)
        if self.arithmetic.left_out:  # one more is begun, and given up
            self._step(self.arithmetic.steps)
            for history in (self.norms, self.losses, self.added, self.states, self.told):
                history.pop()

    def evaluation(self, version: int) -> dict[str, float | None] | None:
        """Return the metrics of a state; None if it is not evaluated."""
        schedule, values = self.arithmetic.evaluations, []
        for batch in range(schedule.batches_of(version) if schedule else 0):
            value = 0
            for layer in range(self.arithmetic.layers):
                value = self.arithmetic.evaluate(self.states[version][layer], layer, batch, value)
            values.append(measured(value, batch))
        total, weight = (math.fsum(part) for part in zip(*values, strict=True)) if values else (0.0, 0.0)
        return {"loss": total / weight} if values else None

    @property
    def digests(self) -> list[str]:
        return [self.arithmetic.digest(state, self.arithmetic.steps) for state in self.states[-1]]

    def _step(self, step: int) -> None:
        a, states = self.arithmetic, self.states[step]
        sums = [[[0] * size for size in a.sizes] for _ in a.bounds[1:]]
        losses = []
        for group, (first, end) in enumerate(pairwise(a.bounds)):
            losses += [self._microbatch(step, m, sums[group]) for m in range(first, end)]
        totals = [self._rounded_sum([row[s] for row in sums], whole=True) for s in range(a.layers)]
        for tie in a.ties:
            shared = reduce(_rounded, (totals[s][0] for s in tie))
            for s in tie:
                totals[s][0] = shared
        squares = [square for s in range(a.layers) for square in a.squared_norms(s, totals[s])]
        norm = math.sqrt(math.fsum(squares)) * a.scale
        self.norms.append(norm)
        added = [a.added(s, step, m, self.inputs[s, step, m]) * a.weight(m) for s, m in self._places()]
        self.losses.append(math.fsum([*losses, *added]) / a.whole)
        self.added.append(math.fsum(added) / a.whole)
        self.told.append(a.remembered(self.told[-1], self.losses[-1] if math.isfinite(self.losses[-1]) else None))
        self.finals.update({(s, step): totals[s] for s in range(a.layers)})
        if step in a.skipped:
            self.states.append(list(states))
            return
        self.states.append([a.applied(states[s], step, totals[s], norm) for s in range(a.layers)])

    def _places(self) -> list[tuple[int, int]]:
        """Return every pair of a layer and a microbatch."""
        return list(product(range(self.arithmetic.layers), range(self.arithmetic.microbatches)))

    def _rounded_sum(self, groups: Sequence[Sequence[int]], *, whole: bool = False) -> list[int]:
        """Return each element's sum over groups, added as a binary tree and rounded to float32 at each node. A node's
        left part has the largest power of two below its number of groups, or, at the root if `whole`, half of them.
        """
        if len(groups) == 1:
            return list(groups[0])
        middle = len(groups) // 2 if whole else max(2**n for n in range(len(groups)) if 2**n < len(groups))
        return list(map(_rounded, self._rounded_sum(groups[:middle]), self._rounded_sum(groups[middle:])))

    def _microbatch(self, step: int, m: int, sums: list[list[int]]) -> float:
        a, states, value = self.arithmetic, self.states[step], 0
        for s in range(a.layers):
            self.inputs[s, step, m] = value
            value = a.forward(states[s], s, step, m, value)
        loss, gradient = a.loss(value, step, m), 0
        for s in reversed(range(a.layers)):
            self.gradients[s, step, m] = gradient
            gradient, new = a.backward(states[s], (s, step, m), self.inputs[s, step, m], gradient)
            sums[s] = a.accumulate(sums[s], new)
        return loss


def _rounded(a: int, b: int) -> int:
    """Return the sum, rounded to float32."""
    return int(c_float(float(a + b)).value)
