"""The state that a stage's optimizer keeps for each parameter, by name, such as "state:0.weight:exp_avg"."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Final

import torch
from torch import Tensor

from bamboo_trainer.stage.state.group_numbers import MARK, GroupNumbers, Scalar
from bamboo_trainer.stage.state.optimizer_trial import OptimizerTrial, tried
from bamboo_trainer.stage.state.parameters import FlatParameters
from bamboo_trainer.tasks.scheduled_optimizer import ScheduledOptimizer

# Optimizers whose state starts as all zeros, so that it can be created before the first step.
_ZERO_STATE: Final = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
)
_STEP: Final = "step"  # key of the step count in torch's optimizers


class Remembered:
    """The optimizer's state. fixed: names and shapes are known from the start, and equal at every version; otherwise it
    first appears with the first step.
    """

    def __init__(self, parameters: FlatParameters, scheduled: ScheduledOptimizer) -> None:
        optimizer = scheduled.inner
        self._slots = parameters.slots
        self._by_name = {slot.name: slot for slot in self._slots}
        self._scheduled, self._optimizer = scheduled, optimizer
        self._groups = GroupNumbers(self._slots, optimizer, scheduled.scheduled)
        scheduled.fuse()
        starts_at_zero = optimizer is not None and scheduled.keeps_its_names and _starts_at_zero(optimizer)
        # Adagrad creates its state itself when it is built.
        self.fixed = optimizer is None or starts_at_zero or type(optimizer) is torch.optim.Adagrad
        if optimizer is not None and starts_at_zero:
            self._create(parameters, optimizer)

    def _create(self, parameters: FlatParameters, optimizer: torch.optim.Optimizer) -> None:
        """Create the state with a step that is then undone."""
        saved = [slot.parameter.detach().clone() for slot in self._slots]
        parameters.bind_final(torch.zeros_like(parameters.flat))
        optimizer.step()
        parameters.unbind()
        with torch.no_grad():
            for slot, before in zip(self._slots, saved, strict=True):
                slot.parameter.copy_(before)
            for _, value in self.values():
                if isinstance(value, Tensor):
                    value.zero_()

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield tensors and numbers, in fixed order; the tensors themselves."""
        for slot in self._slots:
            # Get, because some optimizers would take an entry that reading creates for a state.
            state = self._state.get(slot.parameter, {})
            for key in sorted(state):
                yield f"{state_of(slot.name)}{key}", state[key]

    def of_groups(self) -> dict[str, Scalar]:
        """Return, for each parameter, the numbers of its group that change from step to step."""
        return {
            f"{state_of(slot)}{key}": value for slot, changed in self._groups.of_all() for key, value in changed.items()
        }

    def trial(self, version: int) -> OptimizerTrial | None:
        """Return an optimizer trial of a part of the parameters, whose gradients are set; None if none can be tried."""
        slots = tried(self._slots, version) if self._slots else []
        return OptimizerTrial.begun(slots, self._scheduled, self._groups) if slots else None

    def may_have(self, slot: str, key: str) -> bool:
        """Return whether such a key of that parameter is optional, appearing with a step."""
        return slot in self._by_name and (not self.fixed or key.startswith(MARK))

    def check(self, scalars: Mapping[str, Scalar]) -> None:
        """Raise ValueError if the numbers of groups among these cannot be set."""
        self._groups.checked(self._group_numbers(scalars))

    def replace(self, given: Mapping[str, Tensor]) -> None:
        """Replace all tensors by copies of these; for a state that is not fixed."""
        for slot in self._slots:
            prefix, of = state_of(slot.name), slot.parameter
            state = {
                n.removeprefix(prefix): t.detach().to(of.device if t.dim() or not of.dim() else "cpu", copy=True)
                for n, t in given.items()
                if n.startswith(prefix)
            }
            self._state.pop(slot.parameter, None)
            if state:
                self._state[slot.parameter] = state

    def _place_counts(self) -> None:
        """Put step counts on the parameter's device for a fused or capturable optimizer, on the host for others."""
        for group in [] if self._optimizer is None else self._optimizer.param_groups:
            on_device = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                state = self._state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and not value.dim() and (parameter.dim() or key == _STEP):
                        state[key] = value.to(parameter.device if on_device else "cpu")

    def move(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Replace tensors as large as the parameters by what `moved` returns for them."""
        for slot in self._slots:
            state = self._state.get(slot.parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():  # counters stay where the optimizer wants them
                    state[key] = moved(value)

    def set(self, scalars: Mapping[str, Scalar]) -> None:
        """Set the numbers that belong to this optimizer."""
        for slot, key, value in self._own(scalars):
            if not key.startswith(MARK):
                self._state.setdefault(self._by_name[slot].parameter, {})[key] = value
        self._groups.set(self._groups.checked(self._group_numbers(scalars)))
        self._place_counts()

    def _group_numbers(self, scalars: Mapping[str, Scalar]) -> dict[str, dict[str, Scalar]]:
        """Return the numbers of groups by slot and key."""
        by_slot: dict[str, dict[str, Scalar]] = {}
        for slot, key, value in self._own(scalars):
            if key.startswith(MARK):
                by_slot.setdefault(slot, {})[key] = value
        return by_slot

    def _own(self, scalars: Mapping[str, Scalar]) -> Iterator[tuple[str, str, Scalar]]:
        """Yield slot, key and value of the numbers that belong to this optimizer."""
        for name, value in scalars.items():
            slot, key = parted(name)
            if slot in self._by_name:
                yield slot, key, value

    @property
    def _state(self) -> MutableMapping[Any, Any]:
        return {} if self._optimizer is None else self._optimizer.state


def state_of(slot: str) -> str:
    """Return the prefix of names in a parameter's state."""
    return f"state:{slot}:"


def parted(name: str) -> tuple[str, str]:
    """Return the slot and key of a name; two empty texts if it is not of an optimizer's state."""
    kind, _, place = name.partition(":")
    slot, _, key = place.rpartition(":")
    return (slot, key) if kind == "state" else ("", "")


def _starts_at_zero(optimizer: torch.optim.Optimizer) -> bool:
    if type(optimizer) is torch.optim.SGD:
        return not any(group["dampening"] for group in optimizer.param_groups)
    return type(optimizer) in _ZERO_STATE
