"""The state of a stage's optimizer, by name; where possible, known before the first step.

It includes what belongs to a step and not to a parameter: the scale of losses in fp16, the course of evaluations, the
results of the task's decisions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from bamboo_core.control.evaluations import Course
from bamboo_core.job.training_spec import EvaluationSpec
from bamboo_trainer.decisions import Committed
from bamboo_trainer.frames.payloads import Decided
from bamboo_trainer.memory.placement import to_host
from bamboo_trainer.stage.state import decided, early_stop
from bamboo_trainer.stage.state.group_numbers import Scalar
from bamboo_trainer.stage.state.loss_scale import LossScale
from bamboo_trainer.stage.state.optimizer_trial import OptimizerTrial
from bamboo_trainer.stage.state.parameters import FlatParameters, Slot
from bamboo_trainer.stage.state.remembered import Remembered, parted, state_of
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.deciding import first_decided, frozen_among, next_decided
from bamboo_trainer.tasks.scheduled_optimizer import ScheduledOptimizer
from bamboo_trainer.tasks.task_errors import TaskError


class OptimizerState:
    """The optimizer's part of a stage's state. Names are "state:0.weight:exp_avg". scales_losses: in fp16; each of the
    layers has the scale as "loss_scale:3.scale". early: the evaluations that may end the job, whose course each layer
    has as "early_stop:3.score". decided: the results of the task's decisions for the step that begins at this version,
    which each layer has as "decided:3.learning_rate"; None if the task has no decisions. frozen: the parameters that
    they keep unchanged.

    fixed: names and shapes are known from the start, and equal at every version; otherwise the state first appears with
    the first step.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        scheduled: ScheduledOptimizer,
        scales_losses: bool = False,
        layers: Sequence[int] = (),
        early: EvaluationSpec | None = None,
        task: Task | None = None,
    ) -> None:
        """task: with the decisions, if it has any."""
        self._slots = parameters.slots
        self._names = {slot.name for slot in parameters.slots}
        self._using = {slot.name: _layers_using(slot, parameters) for slot in parameters.slots}
        self._task, self._scheduled = task, scheduled
        self.decided: Decided | None = None
        self.frozen = frozenset[str]()
        self.obey(first_decided(task, 0) if task else None)
        self._remembered = Remembered(parameters, scheduled)
        self.fixed = self._remembered.fixed
        self._layers = tuple(layers)
        self.loss_scale = LossScale.first() if scales_losses else None
        self._early, self.course = early, Course()

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the state's tensors in fixed order; the tensors themselves."""
        for name, value in self._remembered.values():
            if isinstance(value, Tensor):
                yield name, value

    def scalars(self) -> dict[str, Scalar]:
        """Return the state's plain numbers, and those of parameter groups that change from step to step."""
        scalars: dict[str, Scalar] = {}
        for name, value in self._remembered.values():
            if isinstance(value, Tensor):
                continue
            if value is not None and not isinstance(value, int | float):
                key = name.rpartition(":")[2]
                raise TaskError(f"the optimizer's state {key} is {type(value).__name__}, expected tensors and numbers")
            scalars[name] = value
        scalars |= self._remembered.of_groups()
        scalars |= self.loss_scale.numbers(self._layers) if self.loss_scale else {}
        scalars |= early_stop.numbers(self.course, self._early, self._layers) if self._early else {}
        if self.decided:
            using = {name: self._using[name] for name in self.frozen}
            scalars |= decided.numbers(self.decided, using, self._layers)
        return scalars

    def trial(self, version: int) -> OptimizerTrial | None:
        """Return an optimizer trial of a part of the parameters, whose gradients are set; None if none can be tried."""
        return self._remembered.trial(version)

    @property
    def unscale(self) -> float:
        """The inverse of the scale, a power of two: it changes no bits, except of numbers too small for fp32."""
        return 1.0 / self.loss_scale.scale if self.loss_scale else 1.0

    def obey(self, said: Decided | None) -> None:
        """Apply the task's decisions for the next step."""
        self.decided, self.frozen = said, frozen_among(self._using, said)
        self._scheduled.factor = said.learning_rate if said else 1.0

    def decide(self, done: Committed) -> Decided | None:
        """Return the task's decisions after that step, which begins at this version; None if it has none."""
        return next_decided(self._task, self.decided, done) if self._task else None

    def scaled(self, *, finite: bool) -> None:
        """Update the scale after a step. finite: all its gradients are."""
        if self.loss_scale:
            self.loss_scale = self.loss_scale.after(finite=finite)

    def ends_with(self, state: int, metrics: Mapping[str, float]) -> Course | None:
        """Return the course of all evaluations if this state's evaluation ends the job, else None."""
        course = self._course_with(state, metrics)
        return course if self._early and course.is_over(self._early) else None

    def evaluated(self, state: int, metrics: Mapping[str, float]) -> None:
        """Record a state's evaluation, if it has metrics, when the job continues."""
        self.course = self._course_with(state, metrics)

    def _course_with(self, state: int, metrics: Mapping[str, float]) -> Course:
        return self.course.after(self._early, state, metrics) if self._early and metrics else self.course

    def may_have(self, name: str) -> bool:
        """Return whether the name's value is optional: it appears with a step, or depends on the job's settings."""
        if early_stop.is_of(name) or decided.is_of(name):
            return True
        slot, key = parted(name)
        return self._remembered.may_have(slot, key)

    def check_scalars(self, scalars: Mapping[str, Scalar]) -> None:
        """Raise ValueError if these numbers cannot be set."""
        if self.loss_scale:
            LossScale.of_numbers(scalars, self._layers)
        if self._early:
            early_stop.of_numbers(scalars, self._early, self._layers)
        if self.decided:
            decided.of_numbers(scalars, self._layers)
        self._remembered.check(scalars)

    def prefixes(self) -> tuple[str, ...]:
        """Return the prefixes of all names that this optimizer could ever have."""
        return tuple(state_of(slot.name) for slot in self._slots)

    def replace_tensors(self, given: Mapping[str, Tensor]) -> None:
        """Replace all tensors by copies of these; for a state that is not fixed."""
        self._remembered.replace(given)

    def park(self) -> None:
        """Move tensors as large as the parameters to host memory."""
        self._move(to_host)

    def fetch(self, device: torch.device) -> None:
        """Move them back to the parameters' device."""
        self._move(lambda tensor: tensor.to(device))

    def _move(self, moved: Callable[[Tensor], Tensor]) -> None:
        self._remembered.move(moved)

    def set_scalars(self, scalars: Mapping[str, Scalar], version: int) -> None:
        """Set the plain numbers. version: of the state that they belong to."""
        self._remembered.set(scalars)
        if self.loss_scale:
            self.loss_scale = LossScale.of_numbers(scalars, self._layers)
        if self._early:
            self.course = early_stop.of_numbers(scalars, self._early, self._layers)
        if self.decided and self._task:
            self.obey(decided.of_numbers(scalars, self._layers) or first_decided(self._task, version))


def _layers_using(slot: Slot, parameters: FlatParameters) -> frozenset[int]:
    """Return the stage's layers that use a parameter: one, if it is not tied."""
    if slot.group is None:
        return frozenset({int(slot.name.partition(".")[0])})
    return frozenset(layer for group, layer in parameters.uses if group == slot.group)
