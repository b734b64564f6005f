"""A stand-in for a stage of the model that compares each step's inputs with the oracle of `sim_arithmetic`."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from bamboo_core.control.digests import add_digests
from bamboo_core.control.evaluations import EarlyStop
from bamboo_trainer.frames import Commit, CommonState, Decided
from bamboo_trainer.stage.gradients import GradientSum
from bamboo_trainer.stage.layer_state import LayerState
from bamboo_trainer.stage.parameters import TiedSegment, TiedUse
from bamboo_trainer.stage.work import Work
from bamboo_trainer.tasks.evaluation import committed_step
from bamboo_trainer.tasks.inspection import Draws
from bamboo_trainer.tasks.running_buffers import Capture
from sim_arithmetic import Oracle, measured

STATE = "state"
BACKWARD = 2.0  # times a forward
Parts = tuple[Tensor, ...]


class Violation(AssertionError):
    """Raised if the product breaks an invariant."""


@dataclass(slots=True)
class Advancing:
    """A forward that runs layer by layer."""

    step: int
    microbatch: int
    given: list[int]  # to each layer that it has gone through, and to the next one
    layer: int
    end: int
    leaves: Parts = ()
    parts: Parts = ()
    targets: Parts = ()
    capture: Capture = field(default_factory=Capture)
    draws: dict[int, Draws] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.layer == self.end


@dataclass(slots=True)
class Postponed:
    """A microbatch's gradients that are added to the sum later."""

    new: list[int]

    def tensors(self) -> Iterator[Tensor]:
        return iter(())


@dataclass(slots=True)
class Unfinished:
    """A backward whose gradients are added bucket by bucket."""

    new: list[int]
    left: list[slice]  # the buckets to which they are not added yet


def remembering(told: int) -> CommonState:
    """Return a common state (equal on all stages) whose memory of the task's decisions is a number."""
    return CommonState(decided=Decided(memory={"oracle": {"told": told}}))


def remembered(common: CommonState) -> int:
    return int(common.decided.memory["oracle"]["told"] or 0) if common.decided else -1


def _at_once(layer: int, share: float) -> None:
    pass


class StandInValues:
    """A stand-in for `StageValues` (parameters and optimizer), which compares its inputs with the oracle."""

    def __init__(self, oracle: Oracle, stages: Sequence[tuple[int, int]], stage: int) -> None:
        self.oracle, self.arithmetic, self._stages = oracle, oracle.arithmetic, tuple(stages)
        self.index, (self.first, self.end) = stage, stages[stage]
        self.mine = range(self.first, self.end)
        self.last = self.end == self.arithmetic.layers
        self.layers = self.mine
        self.states = {layer: self.arithmetic.initial(layer) for layer in self.mine}
        self.version, self.device = 0, torch.device("cpu")
        self.common = remembering(0)  # decisions remember a number made of all losses so far
        self.size = self.gradient_size = sum(self.arithmetic.sizes[layer] for layer in self.mine)
        self.dtype = torch.float32

    @property
    def buckets(self) -> tuple[slice, ...]:
        """The gradient's buckets: one per layer in the first stage, last layer first; one in any other."""
        if self.first > 0:
            return (slice(0, self.size),)
        ends = accumulate((self.arithmetic.sizes[layer] for layer in self.mine), initial=0)
        return tuple(slice(*place) for place in reversed(list(pairwise(ends))))

    @property
    def tied(self) -> tuple[TiedSegment, ...]:
        """The segments of tied parameters; only stages of one layer have any."""
        return tuple(
            TiedSegment(group=i, offset=0, size=1, uses=tuple(self._use(layer) for layer in tie))
            for i, tie in enumerate(self.arithmetic.ties)
            if self.first in tie
        )

    def _use(self, layer: int) -> TiedUse:
        stage = next(s for s, (first, end) in enumerate(self._stages) if first <= layer < end)
        return TiedUse(stage=stage, layer=layer, offset=0 if layer == self.first else None)

    def _by_layer(self, gradient: Sequence[float]) -> Iterator[tuple[int, list[int]]]:
        start = 0
        for layer in self.mine:
            end = start + self.arithmetic.sizes[layer]
            yield layer, [int(g) for g in gradient[start:end]]
            start = end

    def squared_norms(self, gradient: Tensor) -> Tensor:
        parts = self._by_layer(gradient.tolist())
        squares = [square for layer, part in parts for square in self.arithmetic.squared_norms(layer, part)]
        return torch.tensor(squares, dtype=torch.float64)

    def park(self, parked: bool) -> None:
        """Do nothing: the values are in host memory."""

    def ends(self, evaluation: Mapping[str, float]) -> EarlyStop | None:
        """Return the early stop that `arithmetic` demands at this state; None if training goes on."""
        if self.arithmetic.left_out == 0 or self.version != self.arithmetic.steps:
            return None
        if self.arithmetic.by_decision:
            return EarlyStop(by="oracle")
        return EarlyStop(without=1) if evaluation else None

    def common_after(self, commit: Commit) -> CommonState:
        """Return the common state after a step. Only the root calls this; all holders of a stage get the result."""
        loss = committed_step(self.version + 1, commit).loss
        return remembering(self.arithmetic.remembered(remembered(self.common), loss))

    def begin_step(self, common: CommonState) -> None:
        self.common = common
        self.require("what decisions remember", remembered(common), self.oracle.told[self.version])

    def learning_rate(self, step: int) -> float:
        return 1 / (1 + step)

    def apply(self, gradient: Tensor, norm: float, *, scale: float, tries: bool = False) -> None:
        self.require("scale", scale, self.arithmetic.scale)
        self.require("skipped", self.version in self.arithmetic.skipped, False)
        self.require("norm", norm, self.oracle.norms[self.version])
        for layer, given in self._by_layer(gradient.tolist()):
            self.require(f"final gradient of layer {layer}", given, self.oracle.finals[layer, self.version])
            self.states[layer] = self.arithmetic.applied(self.states[layer], self.version, given, norm)
        self.version += 1

    def allow_commit(self) -> None:
        """Do nothing, as rates and parameters are always finite here."""

    def skip(self) -> None:
        self.require("skipped", self.version in self.arithmetic.skipped, True)
        self.version += 1

    def layer_states(self, only: Collection[int] | None = None, *, shown: bool = True) -> dict[int, LayerState]:
        return {
            layer: LayerState(
                layer=layer,
                version=self.version,
                tensors={STATE: torch.tensor([state])},
                scalars={},
                names={},
                common=self.common,
            )
            for layer, state in self.states.items()
            if only is None or layer in only
        }

    def late_copies(self, only: Collection[int]) -> "LateCopies":
        return LateCopies(self, only)

    def layers_needed(self) -> tuple[int, ...]:
        return tuple(self.mine)

    def restore(self, states: Mapping[int, LayerState]) -> None:
        versions = {states[layer].version for layer in self.mine}
        if len(versions) != 1:
            raise Violation(f"layers {self.mine} are to begin with the versions {versions}")
        if min(versions) < self.version:
            raise Violation(f"layers {self.mine} go back from version {self.version} to {min(versions)}")
        self.states, self.version = {layer: state_of(states[layer]) for layer in self.mine}, versions.pop()
        self.begin_step(states[self.first].common)
        expected = {layer: self.oracle.states[self.version][layer] for layer in self.mine}
        self.require("restored state", self.states, expected)

    def digest(self) -> str:
        return add_digests(self.arithmetic.digest(state, self.version) for state in self.states.values())

    def checksums(self) -> dict[str, int]:
        return {f"state {layer}": number & (2**64 - 1) for layer, number in self.states.items()}

    def require(self, what: str, got: object, expected: object) -> None:
        if got != expected:
            raise Violation(f"layers {self.mine} at version {self.version}: {what} is {got}, not {expected}")


class StandIn:
    """A stand-in for a Stage. spend: called with each layer that runs and its time in multiples of a forward."""

    def __init__(self, values: StandInValues, spend: Callable[[int, float], None] = _at_once) -> None:
        self.values, self._a, self._oracle, self._spend = values, values.arithmetic, values.oracle, spend
        self.has_run = False
        self.as_built = None

    @property
    def runs_ahead(self) -> bool:
        return False

    def expect(self, coming: Iterable[tuple[int, int]]) -> None:
        """Do nothing: there is no data to read."""

    def begin(self, microbatches: Sequence[int], bounds: Sequence[int], *, bucketwise: bool = False) -> Work:
        self.has_run = True  # in the next instruction
        total = GradientSum(self.values.size, torch.device("cpu"), bounds, microbatches, self.values.buckets)
        return Work(total, bucketwise=microbatches[-1] if bucketwise else None)

    def forward(self, work: Work, step: int, microbatch: int, inputs: Parts | None) -> Parts:
        forwarding = self.start(step, microbatch, inputs)
        while not forwarding.done:
            self.advance(forwarding)
        return self.complete(work, forwarding)

    def checked(self, run: "Callable[[], Advancing]") -> "Advancing":
        return run()

    def draws(self) -> dict[int, Draws]:
        return {}

    def wait(self) -> None:
        """Do nothing: everything is computed at once."""

    def start(self, step: int, microbatch: int, inputs: Parts | None) -> "Advancing":
        given = int(inputs[0].item()) if inputs is not None else 0
        if step < self._a.wanted_steps:
            self.values.require(
                f"input of {microbatch}", given, self._oracle.inputs[self.values.first, step, microbatch]
            )
        return Advancing(step, microbatch, [given], self.values.first, self.values.mine.stop)

    def advance(self, forwarding: "Advancing") -> None:
        self.values.require("version", self.values.version, forwarding.step)
        layer, given = forwarding.layer, forwarding.given
        self._spend(layer, 1.0)
        given.append(
            self._a.forward(self.values.states[layer], layer, forwarding.step, forwarding.microbatch, given[-1])
        )
        forwarding.layer += 1

    def complete(self, work: Work, forwarding: "Advancing") -> Parts:
        self.values.require("version", self.values.version, forwarding.step)
        self.values.require("layer", forwarding.layer, forwarding.end)
        *given, output = forwarding.given
        work.contexts[forwarding.microbatch] = ((torch.tensor(given),), ())
        work.added_values[forwarding.microbatch] = [
            ("added", self._a.added(layer, forwarding.step, forwarding.microbatch, g))
            for layer, g in zip(self.values.mine, given, strict=True)
        ]
        if self.values.last:
            m = forwarding.microbatch
            work.losses[m] = self._a.loss(output, forwarding.step, m)
            work.metrics[m] = {"microbatch": (m * self._a.weight(m), self._a.weight(m))}
            if self._a.seed % 2 == 0:
                work.weights[m] = self._a.weight(m)
            return ()
        return (torch.tensor([output]),)

    def rehearse(self, step: int, microbatch: int, inputs: Parts | None) -> Parts:
        """Return made-up outputs of a rehearsal: a zero, or nothing in the last stage."""
        self.has_run = True
        return () if self.values.last else (torch.tensor([0]),)

    def evaluate(self, work: Work, batch: int, inputs: Parts | None) -> Parts:
        value = int(inputs[0].item()) if inputs is not None else 0
        for layer in self.values.mine:
            value = self._a.evaluate(self.values.states[layer], layer, batch, value)
        if not self.values.last:
            return (torch.tensor([value]),)
        work.evaluated[batch] = {"loss": measured(value, batch)}
        return ()

    def backward(
        self, work: Work, step: int, microbatch: int, gradients: Parts | None, *, postpone: bool = False
    ) -> Parts:
        """Run a backward. Depending on the seed, every third microbatch ignores `postpone`, and every fourth never runs
        bucket by bucket.
        """
        given = [int(value) for value in work.contexts.pop(microbatch)[0][0].tolist()]
        gradient = int(gradients[0].item()) if gradients is not None else 0
        expected = self._oracle.gradients[self.values.mine.stop - 1, step, microbatch]
        self.values.require(f"gradient of {microbatch}", gradient, expected)
        new: list[int] = []
        for layer, value in zip(reversed(self.values.mine), reversed(given), strict=True):
            self._spend(layer, BACKWARD)
            gradient, added = self._a.backward(self.values.states[layer], (layer, step, microbatch), value, gradient)
            new = added + new
        waiting: Any = work.postponed
        waiting[microbatch] = Postponed(new)
        if work.bucketwise == microbatch and (microbatch + self._a.seed) % 4:
            unfinished: Any = work
            unfinished.parts = Unfinished(new, list(self.values.buckets))
            self.backward_rest(work, step, microbatch)
            return ()
        if not postpone or (microbatch + self._a.seed) % 3 == 0:
            self.weight_gradients(work, step, microbatch)
        return (torch.tensor([gradient]),) if self.values.first else ()

    def backward_rest(self, work: Work, step: int, microbatch: int) -> None:
        self.values.require("version", self.values.version, step)
        unfinished: Any = work.parts
        if unfinished is None:
            return
        place, target = unfinished.left.pop(0), work.gradients.target
        so_far = [int(g) for g in target[place].tolist()]
        target[place] = torch.tensor(self._a.accumulate(so_far, unfinished.new[place]), dtype=torch.float32)
        if not unfinished.left:
            work.parts = None
            del work.postponed[microbatch]
            work.gradients.added(microbatch)

    def weight_gradients(self, work: Work, step: int, microbatch: int) -> None:
        self.values.require("version", self.values.version, step)
        for m in [m for m in work.postponed if m <= microbatch]:
            rest: Any = work.postponed.pop(m)
            so_far = [int(g) for g in work.gradients.target.tolist()]
            work.gradients.target.copy_(torch.tensor(self._a.accumulate(so_far, rest.new), dtype=torch.float32))
            work.gradients.added(m)

    def bring(self, tensors: Iterable[Tensor]) -> Parts:
        return tuple(tensors)


class LateCopies:
    """A snapshot that is copied layer by layer. Raises Violation if the state changes before the last copy."""

    def __init__(self, values: StandInValues, layers: Collection[int]) -> None:
        self._values, self._left, self._version = values, sorted(layers), values.version
        self.layers: dict[int, LayerState] = {}

    @property
    def done(self) -> bool:
        return not self._left

    def copy_piece(self) -> None:
        if self._values.version != self._version:
            raise Violation(f"layers {self._left} of version {self._version} are copied at {self._values.version}")
        layer = self._left.pop(0)
        self.layers |= self._values.layer_states([layer])


def state_of(kept: LayerState) -> int:
    """Return the number that is a simulated layer's state."""
    return int(kept.tensors[STATE].item())
