"""A simulated job with a silent bit flip (data corruption) at a chosen place, with the real coordinator and engines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from bamboo_core.planning.plan import Cell
from bamboo_trainer.stage.forwarding import Forwarding
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.values import StageValues
from bamboo_trainer.stage.work import Gradients, Work
from bamboo_trainer.task import Parts
from bamboo_trainer.training import TrainingConfig
from training_job import Job

MANTISSA = 23  # bits of a number of fp32; above them are exponent and sign


class Place(StrEnum):
    """A tensor in which a bit can flip during training."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer state"
    INPUT = "boundary, activation in memory"
    FORWARD = "forward output"
    LOSS_GRADIENT = "gradient of the loss"
    RETURNED = "boundary, gradient in memory"
    BACKWARD = "backward output"
    SUM = "gradient, before it is shared"
    FINAL = "final gradient, as it is applied"


AT_REST = (Place.PARAMETERS, Place.OPTIMIZER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A bit to flip: its place, stage, worker, step and microbatch."""

    place: Place
    stage: int
    # owner: whether on the owner in pipeline 0 (True) or on its shadow; worker: if given, on this worker instead
    owner: bool = True
    worker: str = ""
    step: int  # for a place in AT_REST: the state's version
    microbatch: int = 0
    element: int = 0  # modulo the number of the tensor's elements
    bit: int = MANTISSA  # of that element
    every_time: bool = False


def flip(tensor: Tensor, element: int, bit: int) -> None:
    with torch.no_grad():
        numbers = tensor.view(torch.int32).view(-1)
        numbers[element % numbers.numel()] ^= 1 << bit


class _Passed(torch.autograd.Function):
    """An identity function that may flip a bit of the tensor, and leaves the gradient as it is."""

    @staticmethod
    def forward(context: Any, given: Tensor, stage: "FlippingStage") -> Tensor:
        return stage.struck(Place.FORWARD, given)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class FlippingValues(StageValues):
    """A stage's values, in which a bit of a final gradient may flip."""

    struck: Callable[[Tensor], Tensor]  # returns a gradient to be applied, or a copy of it with a flipped bit

    def apply(self, gradient: Tensor, norm: float, *, scale: float = 1.0, tries: bool = False) -> None:
        super().apply(self.struck(gradient), norm, scale=scale, tries=tries)


class FlippingStage(Stage):
    """A stage in which a bit of an input, output or gradient may flip."""

    job: "FlippedJob"
    worker: str
    number: int
    at: tuple[int, int] = (-1, -1)  # step and microbatch of the forward that is run

    def watch_last_layer(self) -> None:
        self.values.layers[self.values.end - 1].register_forward_hook(lambda _layer, _given, found: self._passed(found))

    def _passed(self, found: Any) -> Any:
        if isinstance(found, tuple):
            return (self._passed(found[0]), *found[1:])
        if not torch.is_grad_enabled():
            return found
        passed, at = _Passed.apply(found, self), self.at  # type: ignore[no-untyped-call]
        if self.values.last and passed.requires_grad:
            passed.register_hook(lambda gradient: self.struck(Place.LOSS_GRADIENT, gradient, at))
        return passed

    def struck(self, place: Place, tensor: Tensor, at: tuple[int, int] | None = None) -> Tensor:
        """Return the tensor, or a copy with a flipped bit if the flip is due."""
        if not self.job.flips_now(place, self.worker, self.number, *(at or self.at)):
            return tensor
        wrong = tensor.detach().clone(memory_format=torch.contiguous_format)
        flip(wrong, self.job.flip.element, self.job.flip.bit)
        return wrong.requires_grad_(tensor.requires_grad)

    def struck_final(self, gradient: Tensor) -> Tensor:
        return self.struck(Place.FINAL, gradient, (self.values.version, self.job.flip.microbatch))

    def _struck_first(self, place: Place, parts: Any, at: tuple[int, int]) -> Any:
        if not parts or parts[0] is None or not parts[0].is_floating_point():
            return parts
        return (self.struck(place, parts[0], at), *parts[1:])

    def _run(self, step: int, microbatch: int, inputs: Parts | None, bucketwise: bool) -> Forwarding:
        self.at = (step, microbatch)
        return super()._run(step, microbatch, self._struck_first(Place.INPUT, inputs, self.at), bucketwise)

    def start(self, step: int, microbatch: int, inputs: Parts | None) -> Forwarding:
        return super().start(step, microbatch, self._struck_first(Place.INPUT, inputs, (step, microbatch)))

    def advance(self, forwarding: Forwarding) -> None:
        self.at = (forwarding.step, forwarding.microbatch)
        super().advance(forwarding)

    def backward(
        self, work: Work, step: int, microbatch: int, gradients: Gradients | None, *, postpone: bool = False
    ) -> Gradients:
        at = (step, microbatch)
        given = self._struck_first(Place.RETURNED, gradients, at)
        found = super().backward(work, step, microbatch, given, postpone=postpone)
        if self.job.flips_now(Place.SUM, self.worker, self.number, *at):
            flip(next(work.gradients.tensors()), self.job.flip.element, self.job.flip.bit)
        return self._struck_first(Place.BACKWARD, found, at) or found


class FlippedJob(Job):
    """A job in which a bit flips, once or repeatedly. flipped: number of flips so far. struck: the flips' worker."""

    def __init__(self, document: dict[str, Any], flip: Flip, per_worker: int = 1) -> None:
        super().__init__(document, decide=FlippedJob.look, per_worker=per_worker)
        self.flip, self.flipped, self.struck = flip, 0, ""

    def look(self) -> None:
        """Flip a bit of a parameter or optimizer state once, before a turn in which the state is at the flip's step."""
        if self.flipped or self.flip.place not in AT_REST or self.state.plan is None:
            return
        node = self.nodes.get(self._worker())
        held = node.states.get(self.flip.stage) if node and node.engine.components else None
        if node is None or held is None or held.stage is None or held.version != self.flip.step:
            return
        self.flipped, self.struck, values = 1, node.name, held.stage.values
        parameters = self.flip.place is Place.PARAMETERS
        named = values.parameters.named() if parameters else values.optimizer.named()
        numbers = [t.detach() for _, t in named if t.dtype is torch.float32 and t.numel() > 1]
        flip(numbers[self.flip.element % len(numbers)], self.flip.element, self.flip.bit)

    def _worker(self) -> str:
        plan = self.plan
        if self.flip.worker:
            return self.flip.worker
        role = plan.at(Cell(0, self.flip.stage))
        return role.owner if self.flip.owner else role.replicas[0]

    def flips_now(self, place: Place, worker: str, stage: int, step: int, microbatch: int) -> bool:
        """Return whether the bit flips at this point, and count the flip. It flips once or, if `every_time` is set, at
        every such point of the worker in which it flipped first.
        """
        wanted = (self.flip.place, self.flip.stage, self.flip.step, self.flip.microbatch)
        if (place, stage, step, microbatch) != wanted or self.state.plan is None:
            return False
        expected = self.struck if self.flipped else self._worker()
        if worker != expected:
            return False
        if self.flipped and not self.flip.every_time:
            return False
        self.flipped, self.struck = self.flipped + 1, worker
        return True

    def stage(self, worker: str, stage: int, stages: Sequence[tuple[int, int]], config: TrainingConfig) -> Stage:
        values = FlippingValues(self.task, stage, stages, config, self.computes_on[0])
        made = FlippingStage(values)
        made.job, made.worker, made.number = self, worker, stage
        values.struck = made.struck_final
        made.watch_last_layer()
        return made
