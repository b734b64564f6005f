"""The state of a stage's optimizer, by name. If it starts as zeros (as Adam's), Bamboo can create it before any step.

`GroupNumbers` are numbers in parameter groups that the optimizer changes from step to step, such as a count of steps.
They belong to the state like the optimizer's tensors. They are saved with each parameter, so that a stage of another
split can restore them. If the parameters of one group then have different numbers, restoring fails, because the
optimizer depends on the split. Scheduled values such as the learning rate do not count: the task sets them at each
step. The setting "fused" (`fuse`) counts if the task lets torch choose the kernel. A state without it, such as
one saved by an older release of Bamboo, continues with torch's choice, and so with the same bits.

`OptimizerTrial` checks that a rebuilt optimizer, over fewer parameters, computes the same bits as the real one. Each
stage has an optimizer over its own parameters. A worker that gets a stage's state from another worker or a checkpoint
builds an optimizer and restores its state. So an optimizer must treat every parameter by itself, and keep everything in
its state. One that takes a norm over all parameters, or depends on a count of steps in an attribute, usually fails a
trial. Each trial uses at most MOST elements of one layer's parameters, so it takes little time and memory.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from typing import Any, Final

import torch
from torch import Tensor, nn

from bamboo_trainer.frames import CommonState
from bamboo_trainer.memory.gpus import to_host
from bamboo_trainer.stage.parameters import FlatParameters, Slot
from bamboo_trainer.tasks.evaluation import frozen_among
from bamboo_trainer.tasks.scheduled_optimizer import ScheduledOptimizer, leaves_kernel_open
from bamboo_trainer.tasks.task_errors import NotDeterministic, TaskError
from bamboo_trainer.tasks.user_code import same_bits

Scalar = int | float | bool | None
MARK: Final = "param_group."  # prefix of the keys of a parameter group's numbers
_OTHERS: Final = frozenset({"params", "param_names", "lr"})


class GroupNumbers:
    """The numbers in an optimizer's parameter groups that have changed since this object was made, before the
    optimizer's first step. They belong to the state; scheduled keys, which the task sets at every step, do not.
    """

    def __init__(
        self, slots: Sequence[Slot], optimizer: torch.optim.Optimizer | None, scheduled: Collection[str] = ()
    ) -> None:
        self._others = _OTHERS.union(scheduled)
        self._groups: list[dict[str, Any]] = [] if optimizer is None else optimizer.param_groups
        self._first = [{k: deepcopy(v) for k, v in group.items() if k not in self._others} for group in self._groups]
        places = {id(p): number for number, group in enumerate(self._groups) for p in group["params"]}
        self._places = {s.name: places[id(s.parameter)] for s in slots if id(s.parameter) in places}

    def changed(self) -> dict[str, dict[str, Scalar]]:
        """Return changed numbers by slot name and key (with prefix MARK). Raises TaskError if other values changed."""
        by_group = {number: self._changed(number) for number in dict.fromkeys(self._places.values())}
        return {slot: by_group[number] for slot, number in self._places.items()}

    def _changed(self, number: int) -> dict[str, Scalar]:
        group, first, changed = self._groups[number], self._first[number], dict[str, Scalar]()
        for key in sorted(group.keys() - self._others):
            value = group[key]
            if key in first and _same(value, first[key]):
                continue
            if value is not None and not isinstance(value, int | float):
                raise TaskError(
                    f"the optimizer changes {key!r} of its parameter groups, which is {type(value).__name__}, expected "
                    "plain numbers"
                )
            changed[f"{MARK}{key}"] = value
        return changed

    def checked(self, given: Mapping[str, Mapping[str, Scalar]]) -> list[dict[str, Scalar]]:
        """Return the given numbers by group, for `set`. given: by slot name and key (with prefix MARK). Raises
        ValueError if slots of one group differ.
        """
        wanted: list[dict[str, Scalar] | None] = [None] * len(self._groups)
        witness: dict[int, str] = {}
        for slot, number in self._places.items():
            mine, known = dict(given.get(slot, {})), wanted[number]
            if known is None:
                wanted[number], witness[number] = mine, slot
            elif different := [k for k in known.keys() | mine.keys() if not _same(known.get(k), mine.get(k))]:
                raise ValueError(
                    f"{min(different).removeprefix(MARK)!r} of the optimizer's parameter group differs between "
                    f"{witness[number]} and {slot}: it depends on how the layers are split"
                )
        return [numbers or {} for numbers in wanted]

    def set(self, wanted: Sequence[Mapping[str, Scalar]]) -> None:
        """Reset unscheduled keys, then set numbers from `checked`, without "fused" if the task chooses the kernel."""
        for group, first, numbers in zip(self._groups, self._first, wanted, strict=True):
            for key in group.keys() - self._others - first.keys():
                del group[key]
            group.update(deepcopy(first))
            given = {key.removeprefix(MARK): value for key, value in numbers.items()}
            if not leaves_kernel_open(first):
                given.pop("fused", None)
            group.update(given)


def _same(one: Any, other: Any) -> bool:
    """Return whether two tensors have the same bits, or two other values the same type and `repr`."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    return type(one) is type(other) and repr(one) == repr(other)


MOST: Final = 1 << 22  # elements of the parameters in a trial
NOT_TRIED: Final = "the optimizer was not tried over one layer alone: %s"

logger = logging.getLogger(__name__)


def tried(slots: Sequence[Slot], version: int) -> list[Slot]:
    """Return slots of one layer for a trial, at most MOST elements, perhaps none. Layers take turns with `version`."""
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
    """A trial step of a rebuilt optimizer. Create the trial before the real optimizer's step; call `compare` after."""

    def __init__(self, slots: Sequence[Slot], real: ScheduledOptimizer, groups: GroupNumbers) -> None:
        """Rebuild the optimizer over copies of parameters, gradients and state. Raises TaskError, ValueError."""
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
        self._groups.set(self._groups.checked(groups.changed()))

    def compare(self, version: int) -> None:
        """Take the trial's step after `version` steps, and compare the result bit by bit with the real optimizer's.

        Raises NotDeterministic if they differ. A TaskError of the trial's step is only logged.
        """
        try:
            self._optimizer.step(version)
        except TaskError as error:
            logger.info(NOT_TRIED, error)
            return
        numbers = self._real.changed(), self._groups.changed()
        for slot, twin in self._pairs:
            if what := self._differing(slot, twin, *(repr(one.get(slot.name)) for one in numbers)):
                raise NotDeterministic(
                    f"the optimizer ({type(self._optimizer.inner).__name__}) came to other bits of {what} in step "
                    f"{version + 1} than one that was built anew over parameters of layer {_layer(slot)} alone, with "
                    "the same state: it has to treat every parameter by itself, and to keep all that it remembers in "
                    "its state, since each stage and each worker that takes one over builds its own"
                )

    def _differing(self, slot: Slot, twin: Slot, numbers: str, twins_numbers: str) -> str:
        """Describe the first difference; "" if none. numbers, twins_numbers: group numbers of the two, as text."""
        assert self._optimizer.inner is not None
        if not same_bits(slot.parameter.detach(), twin.parameter.detach()):
            return f"parameter {slot.name}"
        mine, other = self._state.get(slot.parameter, {}), self._optimizer.inner.state.get(twin.parameter, {})
        for key in sorted(mine.keys() | other.keys(), key=str):
            if key not in mine or key not in other or not _same(mine[key], other[key]):
                return f"{key!r} of parameter {slot.name}"
        if numbers != twins_numbers:
            return f"numbers of the group of parameter {slot.name}"
        return ""


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


class OptimizerState:
    """The optimizer's part of a stage's state. Names are like "state:0.weight:exp_avg". frozen: names of the
    parameters that the task's decisions keep unchanged. unscale: the inverse of the loss scale, a power of two, so
    multiplying by it is exact in fp32's normal range; 1 without a loss scale.

    fixed: the state's tensors have the same names and shapes at every version; otherwise a parameter's state may appear
    only with the first step that uses the parameter.
    """

    def __init__(self, parameters: FlatParameters, scheduled: ScheduledOptimizer) -> None:
        self.frozen, self.unscale = frozenset[str](), 1.0
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
        """Create the optimizer's state, all zeros, by a step with zero gradients that is then undone."""
        saved = [slot.parameter.detach().clone() for slot in self._slots]
        parameters.bind_final(torch.zeros_like(parameters.flat))
        optimizer.step()
        parameters.unbind()
        with torch.no_grad():
            for slot, before in zip(self._slots, saved, strict=True):
                slot.parameter.copy_(before)
            for _, tensor in self.named():
                tensor.zero_()

    def obey(self, common: CommonState) -> None:
        """Apply the task's decisions (frozen parameters, learning rate) and the loss scale of the next step."""
        decided, scale = common.decided, common.loss_scale
        self.frozen = frozen_among(self._by_name, decided)
        self.unscale = 1.0 / scale.scale if scale else 1.0
        self._scheduled.factor = decided.learning_rate if decided else 1.0

    def _values(self) -> Iterator[tuple[str, Any]]:
        """Yield all values of the state, tensors not copied, by name and in fixed order."""
        for slot in self._slots:
            # `get`, because reading a missing entry would create one, which some optimizers take for a state.
            state = self._state.get(slot.parameter, {})
            for key in sorted(state):
                yield f"{state_of(slot.name)}{key}", state[key]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the state's tensors, not copied, by name and in fixed order."""
        return ((name, value) for name, value in self._values() if isinstance(value, Tensor))

    def scalars(self) -> dict[str, Scalar]:
        """Return the state's numbers and groups' changed ones, by name. Raises TaskError for values of other types."""
        scalars: dict[str, Scalar] = {}
        for name, value in self._values():
            if isinstance(value, Tensor):
                continue
            if value is not None and not isinstance(value, int | float):
                key = name.rpartition(":")[2]
                raise TaskError(f"the optimizer's state {key} is {type(value).__name__}, expected tensors and numbers")
            scalars[name] = value
        for slot, changed in self._groups.changed().items():
            scalars |= {f"{state_of(slot)}{key}": value for key, value in changed.items()}
        return scalars

    def trial(self, version: int) -> OptimizerTrial | None:
        """Return an optimizer trial of some parameters; None if none can be made. The gradients must be set."""
        slots = tried(self._slots, version) if self._slots else []
        try:
            return OptimizerTrial(slots, self._scheduled, self._groups) if slots else None
        except (TaskError, ValueError) as error:
            logger.info(NOT_TRIED, error)
            return None

    def may_have(self, name: str) -> bool:
        """Return whether a name is optional: an own parameter's group number or, unless `fixed`, any of its state."""
        slot, key = parted(name)
        return slot in self._by_name and (not self.fixed or key.startswith(MARK))

    def prefixes(self) -> tuple[str, ...]:
        """Return the prefix of each parameter's names in the state (`state_of`)."""
        return tuple(map(state_of, self._by_name))

    def check_scalars(self, scalars: Mapping[str, Scalar]) -> None:
        """Raise ValueError if the numbers of one parameter group differ between its parameters."""
        self._groups.checked(self._group_numbers(scalars))

    def replace_tensors(self, given: Mapping[str, Tensor]) -> None:
        """Replace a state that is not `fixed` by copies of these tensors, without numbers, which `set_scalars` adds."""
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
        """Move 0-d tensors (of a 0-d parameter, only "step") to the device if fused or capturable, else to the host."""
        for group in [] if self._optimizer is None else self._optimizer.param_groups:
            on_device = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                state = self._state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and not value.dim() and (parameter.dim() or key == _STEP):
                        state[key] = value.to(parameter.device if on_device else "cpu")

    def park(self) -> None:
        """Start to move the state's tensors, except for scalars such as step counts, to host memory."""
        self._move(to_host)

    def fetch(self, device: torch.device) -> None:
        """Move the state's tensors, except for scalars, back to the parameters' device."""
        self._move(lambda tensor: tensor.to(device))

    def _move(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Replace each of the state's tensors, except for scalars, by `moved(tensor)`."""
        for slot in self._slots:
            state = self._state.get(slot.parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():  # counters stay where the optimizer wants them
                    state[key] = moved(value)

    def set_scalars(self, scalars: Mapping[str, Scalar]) -> None:
        """Set the state's and the groups' numbers, named as in `scalars`; ignore numbers of unknown parameters."""
        for slot, key, value in self._own(scalars):
            if not key.startswith(MARK):
                self._state.setdefault(self._by_name[slot].parameter, {})[key] = value
        self._groups.set(self._groups.checked(self._group_numbers(scalars)))
        self._place_counts()

    def _group_numbers(self, scalars: Mapping[str, Scalar]) -> dict[str, dict[str, Scalar]]:
        """Return the parameter groups' numbers among these, by slot's name and key."""
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
    """Return the prefix of the names in a parameter's optimizer state. slot: the parameter's name."""
    return f"state:{slot}:"


def parted(name: str) -> tuple[str, str]:
    """Split a name such as "state:0.weight:exp_avg" into slot name and key; return ("", "") for any other name."""
    kind, _, place = name.partition(":")
    slot, _, key = place.rpartition(":")
    return (slot, key) if kind == "state" else ("", "")


def _starts_at_zero(optimizer: torch.optim.Optimizer) -> bool:
    if type(optimizer) is torch.optim.SGD:
        return not any(group["dampening"] for group in optimizer.param_groups)
    return type(optimizer) in _ZERO_STATE
