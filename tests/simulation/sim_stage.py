"""A stand-in for a stage of the model, of small exact integers, and an oracle that says what must come out.

Every value is a hash of all that went into it, so a contribution that is lost, doubled, stale or of another
microbatch changes all that follows. Within a group of microbatches the gradient's accumulation depends on the order
(g = g * FACTOR + h mod PRIME). Groups, and the stages of a tied parameter, are summed in float32 as in the product:
one group's sum is exact there, and those of several are rounded, so the order of the sum shows.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bamboo.planning.gradient_groups import group_bounds
from bamboo_trainer.memory.saved_tensors import ContextSize
from bamboo_trainer.stage.gradient_sum import GradientSum
from bamboo_trainer.stage.parameters import TiedSegment, TiedUse
from bamboo_trainer.stage.work import Work

FACTOR = 31
PRIME = 16_777_213  # below 2**24
LAYERS = 3  # of each stage
Parts = tuple[Tensor, ...]


class Violation(AssertionError):
    """The product broke an invariant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """What a job computes. sizes: elements of each stage's gradient. ties: stages that share their first element.

    groups: of microbatches. reproducible: else each pipeline's are a group, and their number stays.
    """

    seed: int
    stages: int
    pipelines: int
    microbatches: int
    steps: int
    sizes: tuple[int, ...]
    ties: tuple[tuple[int, ...], ...] = ()
    groups: int
    reproducible: bool = True

    @property
    def bounds(self) -> tuple[int, ...]:
        """The first microbatch of each group, and their number."""
        return group_bounds(self.microbatches, self.groups if self.reproducible else self.pipelines)

    def training(self) -> dict[str, Any]:
        """This, in a manifest."""
        training = {"steps": self.steps, "globalBatchSize": self.microbatches, "microBatchSize": 1}
        return {**training, **({"gradientGroups": self.groups} if self.reproducible else {"reproducible": False})}

    def initial(self, stage: int) -> int:
        return hash((self.seed, 1, stage))

    def forward(self, state: int, stage: int, step: int, microbatch: int, given: int) -> int:
        return hash((state, 2, stage, step, microbatch, given))

    def loss(self, output: int) -> float:
        return float(output % 1_000_003)

    def backward(self, state: int, place: tuple[int, int, int], given: int, gradient: int) -> tuple[int, list[int]]:
        """The gradient of the inputs, and what is added to the accumulator. place: stage, step, microbatch."""
        seed = hash((state, 3, *place, given, gradient))
        return hash((seed, 4)), [hash((seed, 5, i)) % PRIME for i in range(self.sizes[place[0]])]

    def accumulate(self, so_far: Sequence[int], new: Sequence[int]) -> list[int]:
        return [(a * FACTOR + b) % PRIME for a, b in zip(so_far, new, strict=True)]

    def squared_norms(self, stage: int, gradient: Sequence[int]) -> list[float]:
        elsewhere = any(stage in tie and stage != min(tie) for tie in self.ties)
        return [float(g * g) for g in (gradient[1:] if elsewhere else gradient)]

    def applied(self, state: int, version: int, gradient: Sequence[float], norm: float) -> int:
        return hash((state, 6, version, norm, *(int(g) for g in gradient)))

    def digest(self, state: int, version: int) -> str:
        return f"{state & (2**64 - 1):048x}{version:016x}"


@dataclass
class Oracle:
    """The undisturbed run, computed without engines, plans or messages."""

    arithmetic: Arithmetic
    inputs: dict[tuple[int, int, int], int] = field(default_factory=dict)  # stage, step, microbatch
    gradients: dict[tuple[int, int, int], int] = field(default_factory=dict)  # of a stage's outputs
    finals: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # stage, step
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    states: list[list[int]] = field(default_factory=list)  # [version][stage]

    def __post_init__(self) -> None:
        self.states.append([self.arithmetic.initial(s) for s in range(self.arithmetic.stages)])
        for step in range(self.arithmetic.steps):
            self._step(step)

    @property
    def digests(self) -> list[str]:
        return [self.arithmetic.digest(state, self.arithmetic.steps) for state in self.states[-1]]

    def _step(self, step: int) -> None:
        a, states = self.arithmetic, self.states[step]
        sums = [[[0] * size for size in a.sizes] for _ in a.bounds[1:]]
        losses = []
        for group, (first, end) in enumerate(pairwise(a.bounds)):
            losses += [self._microbatch(step, m, sums[group]) for m in range(first, end)]
        totals = [self._rounded_sum([row[s] for row in sums]) for s in range(a.stages)]
        for tie in a.ties:
            shared = reduce(_rounded, (totals[s][0] for s in tie))
            for s in tie:
                totals[s][0] = shared
        norm = math.sqrt(math.fsum(square for s in range(a.stages) for square in a.squared_norms(s, totals[s])))
        self.norms.append(norm)
        self.losses.append(math.fsum(losses) / len(losses))
        self.finals.update({(s, step): totals[s] for s in range(a.stages)})
        self.states.append([a.applied(states[s], step, totals[s], norm) for s in range(a.stages)])

    def _rounded_sum(self, groups: Sequence[Sequence[int]]) -> list[int]:
        """Of each element: the middle first, as a binary tree."""
        if len(groups) == 1:
            return list(groups[0])
        middle = len(groups) // 2
        left, right = self._rounded_sum(groups[:middle]), self._rounded_sum(groups[middle:])
        return list(map(_rounded, left, right))

    def _microbatch(self, step: int, m: int, sums: list[list[int]]) -> float:
        a, states, value = self.arithmetic, self.states[step], 0
        for s in range(a.stages):
            self.inputs[s, step, m] = value
            value = a.forward(states[s], s, step, m, value)
        loss, gradient = a.loss(value), 0
        for s in reversed(range(a.stages)):
            self.gradients[s, step, m] = gradient
            gradient, new = a.backward(states[s], (s, step, m), self.inputs[s, step, m], gradient)
            sums[s] = a.accumulate(sums[s], new)
        return loss


@dataclass(frozen=True, slots=True)
class StandInLayer:
    """What a checkpoint has of a layer: its stage's state."""

    version: int
    state: int


@dataclass(slots=True)
class Advancing:
    """A forward on its way through the layers."""

    step: int
    microbatch: int
    given: int
    layer: int
    end: int
    leaves: Parts = ()
    parts: Parts = ()

    @property
    def done(self) -> bool:
        return self.layer == self.end


class StandIn:
    """What the engine takes for a Stage. Compares all that it is given with the oracle, at once."""

    def __init__(self, oracle: Oracle, stage: int) -> None:
        self._oracle, self._a, self._stage = oracle, oracle.arithmetic, stage
        self._state = self._a.initial(stage)
        self.version = 0
        self.size = self._a.sizes[stage]
        self.context = ContextSize()

    @property
    def last(self) -> bool:
        return self._stage == self._a.stages - 1

    def expect(self, step: int, microbatch: int) -> None:
        """Has no data to read."""

    @property
    def gradient_size(self) -> int:
        return self.size

    def begin(self, microbatches: Sequence[int], bounds: Sequence[int]) -> Work:
        return Work(GradientSum(self.size, torch.device("cpu"), bounds, microbatches))

    @property
    def first(self) -> int:
        return self._stage * LAYERS

    @property
    def layers(self) -> int:
        return LAYERS

    def forward(self, work: Work, step: int, microbatch: int, inputs: Parts | None) -> Parts:
        forwarding = self.start(step, microbatch, inputs)
        while not forwarding.done:
            self.advance(forwarding)
        return self.complete(work, forwarding)

    def wait(self) -> None:
        """Computes at once."""

    def park(self, parked: bool) -> None:
        """Lives in host memory anyway."""

    def start(self, step: int, microbatch: int, inputs: Parts | None, on_host: bool = False) -> "Advancing":
        given = int(inputs[0].item()) if inputs is not None else 0
        if step < self._a.steps:
            self._require(f"input of {microbatch}", given, self._oracle.inputs[self._stage, step, microbatch])
        return Advancing(step, microbatch, given, self.first, self.first + LAYERS)

    def advance(self, forwarding: "Advancing") -> None:
        self._require("version", self.version, forwarding.step)
        forwarding.layer += 1

    def complete(self, work: Work, forwarding: "Advancing") -> Parts:
        self._require("version", self.version, forwarding.step)
        self._require("layer", forwarding.layer, forwarding.end)
        given, microbatch = forwarding.given, forwarding.microbatch
        output = self._a.forward(self._state, self._stage, forwarding.step, microbatch, given)
        work.contexts[microbatch] = ((torch.tensor([given]),), ())
        if self.last:
            work.losses[microbatch] = self._a.loss(output)
            return ()
        return (torch.tensor([output]),)

    def rehearse(self, step: int, microbatch: int, inputs: Parts | None) -> None:
        self.start(step, microbatch, inputs)

    def backward(self, work: Work, step: int, microbatch: int, gradients: Parts | None) -> Parts:
        given = int(work.contexts.pop(microbatch)[0][0].item())
        gradient = int(gradients[0].item()) if gradients is not None else 0
        expected = self._oracle.gradients[self._stage, step, microbatch]
        self._require(f"gradient of {microbatch}", gradient, expected)
        back, new = self._a.backward(self._state, (self._stage, step, microbatch), given, gradient)
        so_far = [int(g) for g in work.gradients.target.tolist()]
        work.gradients.target.copy_(torch.tensor(self._a.accumulate(so_far, new), dtype=torch.float32))
        work.gradients.added(microbatch)
        return (torch.tensor([back]),) if self._stage else ()

    def squared_norms(self, gradient: Tensor) -> list[float]:
        return self._a.squared_norms(self._stage, [int(g) for g in gradient.tolist()])

    def learning_rate(self, step: int) -> float:
        return 1 / (1 + step)

    def apply(self, gradient: Tensor, norm: float) -> None:
        given = [int(g) for g in gradient.tolist()]
        self._require("final gradient", given, self._oracle.finals[self._stage, self.version])
        self._require("norm", norm, self._oracle.norms[self.version])
        self._state = self._a.applied(self._state, self.version, given, norm)
        self.version += 1

    def snapshot(self) -> tuple[Parts, dict[str, Any]]:
        return (torch.tensor([self._state]),), {"version": self.version}

    def restore(self, parts: Parts, meta: Mapping[str, Any]) -> None:
        if meta["version"] < self.version:
            raise Violation(f"stage {self._stage} goes back from version {self.version} to {meta['version']}")
        self._state, self.version = int(parts[0].item()), int(meta["version"])
        self._require("restored state", self._state, self._oracle.states[self.version][self._stage])

    def layer_states(self, only: Collection[int]) -> dict[int, "StandInLayer"]:
        return {layer: StandInLayer(self.version, self._state) for layer in only}

    def restore_layer(self, kept: "StandInLayer") -> None:
        self._state, self.version = kept.state, kept.version
        self._require("restored state", self._state, self._oracle.states[self.version][self._stage])

    def digest(self) -> str:
        return self._a.digest(self._state, self.version)

    def share_of_digest(self) -> str:
        return self.digest()

    def checksums(self) -> dict[str, int]:
        return {"state": self._state & (2**64 - 1)}

    def state_bytes(self) -> tuple[int, int]:
        return 8, 0

    def tied_segments(self) -> tuple[TiedSegment, ...]:
        return tuple(
            TiedSegment(group=i, offset=0, size=1, uses=tuple(self._use(stage) for stage in tie))
            for i, tie in enumerate(self._a.ties)
            if self._stage in tie
        )

    def _use(self, stage: int) -> TiedUse:
        return TiedUse(stage=stage, layer=stage * LAYERS, offset=0 if stage == self._stage else None)

    def _require(self, what: str, got: object, expected: object) -> None:
        if got != expected:
            raise Violation(f"stage {self._stage} at version {self.version}: {what} is {got}, not {expected}")


def _rounded(a: int, b: int) -> int:
    """A sum in float32."""
    return int(c_float(float(a + b)).value)
