"""A stand-in for a stage of the model, of small exact integers, and an oracle that says what must come out.

Every value is a hash of all that went into it, so a contribution that is lost, doubled, stale or of another
microbatch changes all that follows. Within a group of microbatches the gradient's accumulation depends on the order
(g = g * FACTOR + h mod PRIME). Groups, and the stages of a tied parameter, are summed in float32 as in the product:
one group's sum is exact there, and those of several are rounded, so the order of the sum shows.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bamboo.control.digests import add_digests
from bamboo.planning.gradient_groups import group_bounds
from bamboo_trainer.memory.saved_tensors import ContextSize
from bamboo_trainer.stage.gradient_sum import GradientSum
from bamboo_trainer.stage.layer_state import LayerState
from bamboo_trainer.stage.parameters import TiedSegment, TiedUse
from bamboo_trainer.stage.work import Work

FACTOR = 31
PRIME = 16_777_213  # below 2**24
STATE = "state"
BACKWARD = 2.0  # times a forward
Parts = tuple[Tensor, ...]


class Violation(AssertionError):
    """The product broke an invariant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """What a job computes. sizes: elements of each layer's gradient.

    ties: layers that share their first element; then each layer is a stage.
    groups: of microbatches. reproducible: else each pipeline's are a group, and their number stays.
    skipped: steps whose loss is not finite.
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
    skipped: frozenset[int] = frozenset()

    @property
    def layers(self) -> int:
        return len(self.sizes)

    @property
    def bounds(self) -> tuple[int, ...]:
        """The first microbatch of each group, and their number."""
        return group_bounds(self.microbatches, self.groups if self.reproducible else self.pipelines)

    def training(self) -> dict[str, Any]:
        """This, in a manifest."""
        training: dict[str, Any] = {"steps": self.steps, "globalBatchSize": self.microbatches, "microBatchSize": 1}
        if self.skipped:
            training |= {"nonFinite": "Skip"}
        return {**training, **({"gradientGroups": self.groups} if self.reproducible else {"reproducible": False})}

    def initial(self, layer: int) -> int:
        return hash((self.seed, 1, layer))

    def forward(self, state: int, layer: int, step: int, microbatch: int, given: int) -> int:
        return hash((state, 2, layer, step, microbatch, given))

    def loss(self, output: int, step: int, microbatch: int) -> float:
        """Of the last microbatch of a step that is skipped, it is not finite."""
        if step in self.skipped and microbatch == self.microbatches - 1:
            return math.inf
        return float(output % 1_000_003)

    def backward(self, state: int, place: tuple[int, int, int], given: int, gradient: int) -> tuple[int, list[int]]:
        """The gradient of the inputs, and what is added to the accumulator. place: layer, step, microbatch."""
        seed = hash((state, 3, *place, given, gradient))
        return hash((seed, 4)), [hash((seed, 5, i)) % PRIME for i in range(self.sizes[place[0]])]

    def accumulate(self, so_far: Sequence[int], new: Sequence[int]) -> list[int]:
        return [(a * FACTOR + b) % PRIME for a, b in zip(so_far, new, strict=True)]

    def squared_norms(self, layer: int, gradient: Sequence[int]) -> list[float]:
        elsewhere = any(layer in tie and layer != min(tie) for tie in self.ties)
        return [float(g * g) for g in (gradient[1:] if elsewhere else gradient)]

    def applied(self, state: int, version: int, gradient: Sequence[float], norm: float) -> int:
        return hash((state, 6, version, norm, *(int(g) for g in gradient)))

    def digest(self, state: int, version: int) -> str:
        return f"{state & (2**64 - 1):048x}{version:016x}"


@dataclass
class Oracle:
    """The undisturbed run, computed without engines, plans or messages."""

    arithmetic: Arithmetic
    inputs: dict[tuple[int, int, int], int] = field(default_factory=dict)  # layer, step, microbatch
    gradients: dict[tuple[int, int, int], int] = field(default_factory=dict)  # of a layer's outputs
    finals: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # layer, step
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    states: list[list[int]] = field(default_factory=list)  # [version][layer]

    def __post_init__(self) -> None:
        self.states.append([self.arithmetic.initial(s) for s in range(self.arithmetic.layers)])
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
        totals = [self._rounded_sum([row[s] for row in sums]) for s in range(a.layers)]
        for tie in a.ties:
            shared = reduce(_rounded, (totals[s][0] for s in tie))
            for s in tie:
                totals[s][0] = shared
        norm = math.sqrt(math.fsum(square for s in range(a.layers) for square in a.squared_norms(s, totals[s])))
        self.norms.append(norm)
        self.losses.append(math.fsum(losses) / len(losses))
        self.finals.update({(s, step): totals[s] for s in range(a.layers)})
        if step in a.skipped:
            self.states.append(list(states))
        else:
            self.states.append([a.applied(states[s], step, totals[s], norm) for s in range(a.layers)])

    def _rounded_sum(self, groups: Sequence[Sequence[int]]) -> list[int]:
        """Of each element: the middle first, as a binary tree."""
        if len(groups) == 1:
            return list(groups[0])
        middle = len(groups) // 2
        left, right = self._rounded_sum(groups[:middle]), self._rounded_sum(groups[middle:])
        return list(map(_rounded, left, right))

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


@dataclass(slots=True)
class Advancing:
    """A forward on its way through the layers. given: to each layer that it has gone through, and to the next one."""

    step: int
    microbatch: int
    given: list[int]
    layer: int
    end: int
    leaves: Parts = ()
    parts: Parts = ()

    @property
    def done(self) -> bool:
        return self.layer == self.end


def _at_once(layer: int, share: float) -> None:
    pass


class StandIn:
    """What the engine takes for a Stage: some layers of the model. Compares all that it is given with the oracle.

    spend: lets the time pass that a layer's forward takes, or that many times as much.
    """

    def __init__(
        self,
        oracle: Oracle,
        stages: Sequence[tuple[int, int]],
        stage: int,
        spend: Callable[[int, float], None] = _at_once,
    ) -> None:
        self._spend = spend
        self._oracle, self._a, self._stages = oracle, oracle.arithmetic, tuple(stages)
        self._mine = range(*stages[stage])
        self._states = {layer: self._a.initial(layer) for layer in self._mine}
        self.version = 0
        self.size = sum(self._a.sizes[layer] for layer in self._mine)
        self.context = ContextSize()

    @property
    def last(self) -> bool:
        return self._mine.stop == self._a.layers

    @property
    def reads_ahead(self) -> int:
        """It has no data to read."""
        return 0

    @property
    def gradient_size(self) -> int:
        return self.size

    def begin(self, microbatches: Sequence[int], bounds: Sequence[int]) -> Work:
        return Work(GradientSum(self.size, torch.device("cpu"), bounds, microbatches))

    @property
    def first(self) -> int:
        return self._mine.start

    @property
    def layers(self) -> int:
        return len(self._mine)

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
            self._require(f"input of {microbatch}", given, self._oracle.inputs[self.first, step, microbatch])
        return Advancing(step, microbatch, [given], self.first, self._mine.stop)

    def advance(self, forwarding: "Advancing") -> None:
        self._require("version", self.version, forwarding.step)
        layer, given = forwarding.layer, forwarding.given
        self._spend(layer, 1.0)
        given.append(self._a.forward(self._states[layer], layer, forwarding.step, forwarding.microbatch, given[-1]))
        forwarding.layer += 1

    def complete(self, work: Work, forwarding: "Advancing") -> Parts:
        self._require("version", self.version, forwarding.step)
        self._require("layer", forwarding.layer, forwarding.end)
        *given, output = forwarding.given
        work.contexts[forwarding.microbatch] = ((torch.tensor(given),), ())
        if self.last:
            work.losses[forwarding.microbatch] = self._a.loss(output, forwarding.step, forwarding.microbatch)
            return ()
        return (torch.tensor([output]),)

    def rehearse(self, step: int, microbatch: int, inputs: Parts | None) -> None:
        self.start(step, microbatch, inputs)

    def backward(self, work: Work, step: int, microbatch: int, gradients: Parts | None) -> Parts:
        given = [int(value) for value in work.contexts.pop(microbatch)[0][0].tolist()]
        gradient = int(gradients[0].item()) if gradients is not None else 0
        expected = self._oracle.gradients[self._mine.stop - 1, step, microbatch]
        self._require(f"gradient of {microbatch}", gradient, expected)
        new: list[int] = []
        for layer, value in zip(reversed(self._mine), reversed(given), strict=True):
            self._spend(layer, BACKWARD)
            gradient, added = self._a.backward(self._states[layer], (layer, step, microbatch), value, gradient)
            new = added + new
        so_far = [int(g) for g in work.gradients.target.tolist()]
        work.gradients.target.copy_(torch.tensor(self._a.accumulate(so_far, new), dtype=torch.float32))
        work.gradients.added(microbatch)
        return (torch.tensor([gradient]),) if self.first else ()

    def _by_layer(self, gradient: Sequence[float]) -> Iterator[tuple[int, list[int]]]:
        start = 0
        for layer in self._mine:
            end = start + self._a.sizes[layer]
            yield layer, [int(g) for g in gradient[start:end]]
            start = end

    def squared_norms(self, gradient: Tensor) -> list[float]:
        parts = self._by_layer(gradient.tolist())
        return [square for layer, part in parts for square in self._a.squared_norms(layer, part)]

    def learning_rate(self, step: int) -> float:
        return 1 / (1 + step)

    def apply(self, gradient: Tensor, norm: float) -> None:
        self._require("skipped", self.version in self._a.skipped, False)
        self._require("norm", norm, self._oracle.norms[self.version])
        for layer, given in self._by_layer(gradient.tolist()):
            self._require(f"final gradient of layer {layer}", given, self._oracle.finals[layer, self.version])
            self._states[layer] = self._a.applied(self._states[layer], self.version, given, norm)
        self.version += 1

    def skip(self) -> None:
        self._require("skipped", self.version in self._a.skipped, True)
        self.version += 1

    def snapshot(self) -> tuple[Parts, dict[str, Any]]:
        return (torch.tensor(list(self._states.values())),), {"version": self.version}

    def restore(self, parts: Parts, meta: Mapping[str, Any]) -> None:
        if meta["version"] < self.version:
            raise Violation(f"layers {self._mine} go back from version {self.version} to {meta['version']}")
        self._begin_with(dict(zip(self._mine, map(int, parts[0].tolist()), strict=True)), int(meta["version"]))

    def layer_states(self, only: Collection[int] | None = None, *, shown: bool = True) -> dict[int, LayerState]:
        return {
            layer: LayerState(
                layer=layer, version=self.version, tensors={STATE: torch.tensor([state])}, scalars={}, names={}
            )
            for layer, state in self._states.items()
            if only is None or layer in only
        }

    def layers_needed(self) -> tuple[int, ...]:
        return tuple(self._mine)

    def restore_layers(self, states: Mapping[int, LayerState]) -> None:
        versions = {states[layer].version for layer in self._mine}
        if len(versions) != 1:
            raise Violation(f"layers {self._mine} are to begin with the versions {versions}")
        self._begin_with({layer: state_of(states[layer]) for layer in self._mine}, versions.pop())

    def _begin_with(self, states: dict[int, int], version: int) -> None:
        self._states, self.version = states, version
        expected = {layer: self._oracle.states[version][layer] for layer in self._mine}
        self._require("restored state", states, expected)

    def digest(self) -> str:
        return add_digests(self._a.digest(state, self.version) for state in self._states.values())

    def share_of_digest(self) -> str:
        return self.digest()

    def checksums(self) -> dict[str, int]:
        return {str(layer): state & (2**64 - 1) for layer, state in self._states.items()}

    def state_bytes(self) -> tuple[int, int]:
        return 8 * len(self._states), 0

    def tied_segments(self) -> tuple[TiedSegment, ...]:
        """Ties are between stages of one layer only."""
        return tuple(
            TiedSegment(group=i, offset=0, size=1, uses=tuple(self._use(layer) for layer in tie))
            for i, tie in enumerate(self._a.ties)
            if self.first in tie
        )

    def _use(self, layer: int) -> TiedUse:
        stage = next(s for s, (first, end) in enumerate(self._stages) if first <= layer < end)
        return TiedUse(stage=stage, layer=layer, offset=0 if layer == self.first else None)

    def _require(self, what: str, got: object, expected: object) -> None:
        if got != expected:
            raise Violation(f"layers {self._mine} at version {self.version}: {what} is {got}, not {expected}")


def state_of(kept: LayerState) -> int:
    """What a layer's state of ours holds."""
    return int(kept.tensors[STATE].item())


def _rounded(a: int, b: int) -> int:
    """A sum in float32."""
    return int(c_float(float(a + b)).value)
