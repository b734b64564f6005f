"""A trial of the optimizer: a rebuilt one, over fewer parameters, must come to the same bits as the real one.

Each stage has an optimizer over its own parameters. A worker that takes a stage over, or starts from a checkpoint,
builds one and restores its state. So an optimizer must treat every parameter by itself, and keep everything in its
state. One that takes a norm over its parameters, or counts its steps in an attribute, comes to other bits here. Each
trial uses a part of one layer, so it takes little time and memory.
"""

import logging
from collections.abc import Sequence
from typing import Any, Final, Self

from torch import Tensor, nn

from bamboo_trainer.stage.state.group_numbers import GroupNumbers
from bamboo_trainer.stage.state.parameters import Slot
from bamboo_trainer.tasks.scheduled_optimizer import ScheduledOptimizer
from bamboo_trainer.tasks.task_errors import NotDeterministic, TaskError
from bamboo_trainer.tasks.user_code import same_bits

MOST: Final = 1 << 22  # elements of the parameters in a trial

logger = logging.getLogger(__name__)


def tried(slots: Sequence[Slot], version: int) -> list[Slot]:
    """Return slots of a single layer, chosen by the version: as many of its parameters as fit MOST elements."""
    layers = list(dict.fromkeys(_layer(slot) for slot in slots))
    chosen, size = list[Slot](), 0
    for slot in slots:
        if _layer(slot) == layers[version % len(layers)] and size + slot.parameter.numel() <= MOST:
            chosen.append(slot)
            size += slot.parameter.numel()
    return chosen


def _layer(slot: Slot) -> str:
    return slot.name.partition(".")[0]


class OptimizerTrial:
    """A trial step of a rebuilt optimizer, made when the gradients are set, before the real optimizer's step."""

    def __init__(self, slots: Sequence[Slot], real: ScheduledOptimizer, groups: GroupNumbers) -> None:
        """Build the second optimizer. Raises TaskError or ValueError if that is impossible."""
        assert real.inner is not None
        self._state = real.inner.state
        twins = [Slot(s.name, nn.Parameter(s.parameter.detach().clone()), 0, None) for s in slots]
        self._pairs = list(zip(slots, twins, strict=True))
        self._optimizer = ScheduledOptimizer(real.task, [(twin.name, twin.parameter) for twin in twins])
        assert self._optimizer.inner is not None
        self._optimizer.factor = real.factor
        self._groups, self._real = GroupNumbers(twins, self._optimizer.inner, self._optimizer.scheduled), groups
        for slot, twin in self._pairs:
            gradient = slot.parameter.grad
            twin.parameter.grad = None if gradient is None else gradient.clone()
            self._optimizer.inner.state.pop(twin.parameter, None)
            if state := self._state.get(slot.parameter):
                self._optimizer.inner.state[twin.parameter] = {
                    key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()
                }
        self._groups.set(self._groups.checked({slot.name: groups.of(slot.name) for slot in slots}))

    @classmethod
    def begun(cls, *given: Any) -> Self | None:
        """Return a trial; None if it cannot be made, and log why."""
        try:
            return cls(*given)
        except (TaskError, ValueError) as error:
            logger.info("the optimizer was not tried over one layer alone: %s", error)
            return None

    def compare(self, version: int) -> None:
        """Compare after the real optimizer's step from that version. Raises NotDeterministic."""
        try:
            self._optimizer.step(version)
        except TaskError as error:
            logger.info("the optimizer was not tried over one layer alone: %s", error)
            return
        for slot, twin in self._pairs:
            if what := self._differing(slot, twin):
                raise NotDeterministic(
                    f"the optimizer ({type(self._optimizer.inner).__name__}) came to other bits of {what} in step "
                    f"{version + 1} than one that was built anew over parameters of layer {_layer(slot)} alone, with "
                    "the same state: it has to treat every parameter by itself, and to keep all that it remembers in "
                    "its state, since each stage and each worker that takes one over builds its own"
                )

    def _differing(self, slot: Slot, twin: Slot) -> str:
        """Describe the first difference; "" if all is equal."""
        assert self._optimizer.inner is not None
        if not same_bits(slot.parameter.detach(), twin.parameter.detach()):
            return f"parameter {slot.name}"
        mine, other = self._state.get(slot.parameter, {}), self._optimizer.inner.state.get(twin.parameter, {})
        for key in sorted(mine.keys() | other.keys(), key=str):
            if key not in mine or key not in other or not _same(mine[key], other[key]):
                return f"{key!r} of parameter {slot.name}"
        if repr(self._real.of(slot.name)) != repr(self._groups.of(twin.name)):
            return f"numbers of the group of parameter {slot.name}"
        return ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    return repr(one) == repr(other)
