"""The state of a stage's optimizer, by name; where possible, known before the first step."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from bamboo_trainer.frames.payloads import CommonState
from bamboo_trainer.memory.placement import to_host
from bamboo_trainer.stage.state.group_numbers import Scalar
from bamboo_trainer.stage.state.optimizer_trial import OptimizerTrial
from bamboo_trainer.stage.state.parameters import FlatParameters
from bamboo_trainer.stage.state.remembered import Remembered, parted, state_of
from bamboo_trainer.tasks.deciding import frozen_among
from bamboo_trainer.tasks.scheduled_optimizer import ScheduledOptimizer
from bamboo_trainer.tasks.task_errors import TaskError


class OptimizerState:
    """The optimizer's part of a stage's state. Names are "state:0.weight:exp_avg". frozen: the parameters that the
    task's decisions keep unchanged. unscale: the inverse of the loss scale, a power of two: it changes no bits, except
    of numbers too small for fp32.

    fixed: names and shapes are known from the start, and equal at every version; otherwise the state first appears with
    the first step.
    """

    def __init__(self, parameters: FlatParameters, scheduled: ScheduledOptimizer) -> None:
        self._slots = parameters.slots
        self._names = tuple(slot.name for slot in parameters.slots)
        self._scheduled = scheduled
        self.frozen, self.unscale = frozenset[str](), 1.0
        self._remembered = Remembered(parameters, scheduled)
        self.fixed = self._remembered.fixed

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the state's tensors in fixed order; the tensors themselves."""
        for name, value in self._remembered.values():
            if isinstance(value, Tensor):
                yield name, value

    def scalars(self) -> dict[str, Scalar]:
        """Return the state's plain numbers, and the numbers of parameter groups that change from step to step."""
        scalars: dict[str, Scalar] = {}
        for name, value in self._remembered.values():
            if isinstance(value, Tensor):
                continue
            if value is not None and not isinstance(value, int | float):
                key = name.rpartition(":")[2]
                raise TaskError(f"the optimizer's state {key} is {type(value).__name__}, expected tensors and numbers")
            scalars[name] = value
        return scalars | self._remembered.of_groups()

    def trial(self, version: int) -> OptimizerTrial | None:
        """Return an optimizer trial of a part of the parameters, whose gradients are set; None if none can be tried."""
        return self._remembered.trial(version)

    def obey(self, common: CommonState) -> None:
        """Use the task's decisions and the loss scale of the next step."""
        decided, scale = common.decided, common.loss_scale
        self.frozen = frozen_among(self._names, decided)
        self.unscale = 1.0 / scale.scale if scale else 1.0
        self._scheduled.factor = decided.learning_rate if decided else 1.0

    def may_have(self, name: str) -> bool:
        """Return whether the name's value is optional: it appears with a step, or depends on the job's settings."""
        slot, key = parted(name)
        return self._remembered.may_have(slot, key)

    def check_scalars(self, scalars: Mapping[str, Scalar]) -> None:
        """Raise ValueError if these numbers cannot be set."""
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
        """Move the state's tensors back to the parameters' device."""
        self._move(lambda tensor: tensor.to(device))

    def _move(self, moved: Callable[[Tensor], Tensor]) -> None:
        self._remembered.move(moved)

    def set_scalars(self, scalars: Mapping[str, Scalar]) -> None:
        """Set the plain numbers."""
        self._remembered.set(scalars)
