"""Checks that an optimizer's step leaves finite numbers: parameters after each step, the rest of the state when it is
saved or sent, which reads all of it anyway.

The next step's loss would show it too late, for another step; after the last step nothing would show it.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from bamboo_trainer.memory.host_copies import Copy, HostCopies
from bamboo_trainer.stage.state import layer_state
from bamboo_trainer.stage.state.optimizer_state import OptimizerState
from bamboo_trainer.stage.state.parameters import FlatParameters
from bamboo_trainer.tasks.scheduled_optimizer import ScheduledOptimizer
from bamboo_trainer.tasks.task_errors import TaskError

_WIDER: Final = frozenset({torch.float16, torch.bfloat16})  # whose norm is taken in fp32


class FiniteState:
    """Checks that a stage's state is finite. On an asynchronous device only `confirm` waits for a step's result.

    A parameter whose initial values include infinity, such as a mask, may have it; nothing may be NaN. The optimizer's
    state may be infinite, such as a bound that nothing has reached yet.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        parameters: FlatParameters,
        optimizer: ScheduledOptimizer,
        remembered: OptimizerState,
        copies: HostCopies,
    ) -> None:
        self._layers, self._parameters, self._copies = layers, parameters, copies
        self._optimizer, self._remembered = optimizer, remembered
        self._infinite = frozenset(s.name for s in parameters.slots if not _all_finite(s.parameter.detach()))
        self._pending: tuple[int, Copy] | None = None
        self._excused = False

    def look(self, step: int) -> None:
        """Check the parameters after that step. Raises TaskError if the result is available at once."""
        if self._excused:
            return
        tensors = [s.parameter.detach() for s in self._parameters.slots if s.name not in self._infinite]
        copy = self._copies.start((_norms(tensors),))
        self._pending = (step, copy)
        if copy.ready():
            self.confirm()

    def confirm(self) -> None:
        """Wait for the newest step's check, if one is pending. Raises TaskError."""
        if self._pending is None:
            return
        (step, copy), self._pending = self._pending, None
        (norms,) = copy.wait()
        if self._infinite or not bool(torch.isfinite(norms).all()):
            self._name_parameter(step)

    def gradient_was_not(self) -> None:
        """Skip checks from now on: the newest step's gradient was not finite, which is reported instead."""
        self._excused = True

    def forget(self) -> None:
        """Forget pending checks: the state was replaced."""
        self._pending, self._excused = None, False

    def check_all(self, version: int) -> None:
        """Check the whole state at that version, with the optimizer's. Raises TaskError."""
        self.confirm()
        if self._excused:
            return
        named = [(name, t.detach()) for name, t in self._remembered.named() if t.is_floating_point() and t.numel()]
        if not _have_finite_norms([tensor for _, tensor in named]):
            for name, tensor in named:
                if bool(torch.isnan(tensor).any()):
                    slot, _, key = name.partition(":")[2].rpartition(":")
                    of = layer_state.in_words(self._layers, f"parameter:{slot}")
                    raise TaskError(f"{self._who()} remembers NaN as {key!r} of {of} after step {version}")

    def _name_parameter(self, step: int) -> None:
        """Raise TaskError for a parameter with wrong numbers, if any: finite numbers may have an infinite norm."""
        for slot in self._parameters.slots:
            values = slot.parameter.detach()
            wrong = torch.isnan(values).any() if slot.name in self._infinite else not _all_finite(values)
            if bool(wrong):
                of = layer_state.in_words(self._layers, f"parameter:{slot.name}")
                rate = self._optimizer.learning_rate(step)
                raise TaskError(
                    f"{self._who()} left numbers in {of} that are not finite, in step {step + 1} (rate {rate:g})"
                )

    def _who(self) -> str:
        return f"the optimizer ({type(self._optimizer.inner).__name__})"


def _have_finite_norms(tensors: Iterable[Tensor]) -> bool:
    """Return whether all norms are finite, on any device: an optimizer may keep its step count on the host."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    return all(bool(torch.isfinite(_norms(group)).all()) for group in by_device.values())


def _norms(tensors: Iterable[Tensor]) -> Tensor:
    """Return each tensor's norm in fp64, in one pass: finite only if all its numbers are. All are on one device. The
    result has one dimension, grouped by type and not in the order of the tensors.
    """
    by_kind: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault(tensor.dtype, []).append(tensor)
    norms = [
        norm.double()
        for dtype, group in by_kind.items()
        for norm in torch._foreach_norm(group, 2, torch.float32 if dtype in _WIDER else None)
    ]
    return torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64)


def _all_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())
