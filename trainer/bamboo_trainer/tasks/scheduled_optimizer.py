"""The user's optimizer with the task's learning rate and other schedules."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any, Final

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from bamboo_trainer.optimizers import Combined
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.task_errors import TaskError, in_task

Value = float | tuple[float, ...]
RATE: Final = "lr"
# Keys whose schedules do not change which tensors an optimizer's state has.
_HARMLESS: Final = frozenset({RATE, "betas", "weight_decay", "eps", "alpha", "rho", "lr_decay", "lambd"})
# Optimizers whose steps leave gradients unchanged. SGD's step changes them with foreach and nesterov.
_READING: Final = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
)
# Optimizers whose fused kernels compute each element only from the elements at the same place and the step's count.
# SGD's kernel takes one flag for all parameters: whether momentum begins.
_FUSED: Final = (torch.optim.Adam, torch.optim.AdamW)


class ScheduledOptimizer:
    """The user's optimizer (`inner`) with the task's schedules; `inner` is None if the stage has no trained parameters.
    factor: multiplies the learning rate; 1 unless a decision of the task sets it.
    """

    def __init__(self, task: Task, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.task, self.factor = task, 1.0
        self.inner = _build(task, named) if named else None
        self._schedules = _schedules(task)
        names = (RATE, *self._schedules)
        self._multipliers = {} if self.inner is None else {name: _multipliers(self.inner, name) for name in names}

    @property
    def scheduled(self) -> frozenset[str]:
        """The parameter-group keys that `step` sets each time; the optimizer's state therefore leaves them out."""
        return frozenset((RATE, *self._schedules))

    @property
    def keeps_its_names(self) -> bool:
        """Whether no schedule can change which tensors the optimizer's state has (a schedule of SGD's momentum can)."""
        return self.scheduled <= _HARMLESS

    @property
    def only_reads(self) -> bool:
        """Whether `inner` certainly leaves the gradients unchanged in a step; False if it is None or has hooks."""
        return self.inner is not None and type(self.inner) in _READING and not _is_hooked(self.inner)

    def fuse(self) -> None:
        """Use torch's fused kernels where the task allows it (see the function `fuse`). Call it before any step."""
        if self.inner is not None:
            fuse(self.inner)

    def learning_rate(self, version: int) -> float:
        """Return the task's learning rate for the step after `version` steps, times `factor`. Raises TaskError."""
        with in_task(f"task.learning_rate({version})"):
            rate = float(self.task.learning_rate(version))
        if not (math.isfinite(rate) and rate >= 0):
            raise TaskError(
                f"task.learning_rate({version}) returned {rate}, expected a finite number that is not negative"
            )
        return rate * self.factor

    def settings(self, version: int) -> dict[str, Value]:
        """Return the settings of the step after `version` steps, by key: the learning rate and, if `inner` is not None,
        the other schedules' values. Raises TaskError.
        """
        values: dict[str, Value] = {RATE: self.learning_rate(version)}
        if self.inner is not None:
            for name, schedule in self._schedules.items():
                with in_task(f"task.schedules[{name!r}]({version})"):
                    value = schedule(version)
                values[name] = _checked(name, value, self.inner.defaults[name], version)
        return values

    def step(self, version: int) -> None:
        """Apply the `settings` of the step after `version` steps, then take that step with the parameters' gradients.
        Do nothing if `inner` is None. Raises TaskError; TaskOutOfMemory if memory runs out.
        """
        if self.inner is None:
            return
        for name, value in self.settings(version).items():
            self._set(name, value)
        with in_task(f"the optimizer ({type(self.inner).__name__}), in step {version + 1},"):
            self.inner.step()

    def _set(self, name: str, value: Value) -> None:
        assert self.inner is not None
        for group, multiplier in zip(self.inner.param_groups, self._multipliers[name], strict=True):
            group[name] = value if isinstance(value, tuple) else value * multiplier


def require_learning_rate(task: Task) -> None:
    """Raise TaskError unless the task's learning rate and schedules are functions and the rate of step 0 is valid."""
    rate = task.learning_rate
    if isinstance(rate, type) or not callable(rate):
        given = f"the class {rate.__name__}" if isinstance(rate, type) else type(rate).__name__
        raise TaskError(
            f"task.learning_rate: expected a function of the step that returns the rate, got {given} "
            "(bamboo_trainer.schedules makes such functions)"
        )
    ScheduledOptimizer(task, []).learning_rate(0)


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Use torch's fused kernel in Adam and AdamW, alone or in Combined, for each parameter group whose kernel the task
    does not choose. Skip optimizers with a replaced `step`, and groups with a parameter that is not contiguous: the
    kernel assumes contiguity without checking it. Call this function before the first step.
    """
    for one in optimizer.parts if isinstance(optimizer, Combined) else (optimizer,):
        for group in one.param_groups if type(one) in _FUSED and "step" not in vars(one) else ():
            if leaves_kernel_open(group) and all(parameter.is_contiguous() for parameter in group["params"]):
                group["fused"] = True


def leaves_kernel_open(group: Mapping[str, Any]) -> bool:
    """Return whether the task lets torch choose a parameter group's kernel. group: not yet changed by `fuse`."""
    choice = (group.get("fused"), group.get("foreach"))
    return choice == (None, None) and not group.get("differentiable") and not group.get("capturable")


def _build(task: Task, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    with in_task("task.optimizer"):
        optimizer = task.optimizer(named)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(f"task.optimizer returned {type(optimizer).__name__}, expected a torch.optim.Optimizer")
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise TaskError(
            f"task.optimizer returned {type(optimizer).__name__}, whose step computes losses again by a closure; "
            "expected an optimizer that takes a step from the gradients alone, such as AdamW"
        )
    for inner in _held(vars(optimizer).values()):
        if inner.state is not optimizer.state:
            raise TaskError(
                f"task.optimizer returned {type(optimizer).__name__}, which keeps what it remembers in another "
                f"optimizer ({type(inner).__name__}), where no replica would get it; "
                "bamboo_trainer.optimizers.Combined makes one of several"
            )
    return optimizer


def _is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has step hooks, its own or torch's global ones, or a replaced `step`."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    everybodys = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    return any(own) or any(everybodys) or "step" in vars(optimizer)


def _held(values: Iterable[object]) -> Iterator[torch.optim.Optimizer]:
    """Yield each optimizer that is one of these values, or an item of a list, tuple or dictionary among them."""
    for value in values:
        if isinstance(value, torch.optim.Optimizer):
            yield value
        elif isinstance(value, list | tuple):
            yield from (one for one in value if isinstance(one, torch.optim.Optimizer))
        elif isinstance(value, dict):
            yield from (one for one in value.values() if isinstance(one, torch.optim.Optimizer))


def _schedules(task: Task) -> dict[str, Callable[[int], Any]]:
    """Return the task's schedules, by the parameter-group key that each one sets. Raises TaskError for invalid ones."""
    given = task.schedules
    if not isinstance(given, Mapping) or not all(isinstance(k, str) and callable(v) for k, v in given.items()):
        raise TaskError('task.schedules must be a mapping from names such as "momentum" to functions of the step')
    if RATE in given:
        raise TaskError('task.schedules names "lr", whose schedule is task.learning_rate')
    return dict(sorted(given.items()))


def _checked(name: str, value: object, default: object, version: int) -> Value:
    """Check a schedule's value; return it as a float, or as a tuple like the optimizer's default. Raises TaskError."""
    wanted = len(default) if isinstance(default, tuple | list) else None
    values = tuple(value) if wanted and isinstance(value, tuple | list) else (value,)
    numbers = tuple(float(v) for v in values if isinstance(v, int | float) and math.isfinite(v))
    if len(numbers) != len(values) or len(numbers) != (wanted or 1):
        expected = f"{wanted} finite numbers" if wanted else "a finite number"
        raise TaskError(f"task.schedules[{name!r}]({version}) returned {value!r}, expected {expected}")
    return numbers if wanted else numbers[0]


def _multipliers(optimizer: torch.optim.Optimizer, name: str) -> tuple[float, ...]:
    """Return each parameter group's initial value of `name`, divided by the optimizer's default. Raises TaskError."""
    if name != RATE and name not in optimizer.defaults:
        known = ", ".join(sorted(k for k, v in optimizer.defaults.items() if isinstance(v, int | float | tuple)))
        raise TaskError(
            f"task.schedules names {name!r}, which {type(optimizer).__name__} does not have; it has {known}"
        )
    default = optimizer.defaults.get(name)
    values = [group.get(name, default) for group in optimizer.param_groups]
    if all(value == default for value in values):
        return (1.0,) * len(values)
    what = "a learning rate" if name == RATE else f"{name} values"
    if not isinstance(default, int | float | torch.Tensor) or not default > 0:
        raise TaskError(
            f"task.optimizer gives parameter groups {what} of their own ({', '.join(map(str, values))}), "
            f"but the optimizer's default, of which they are multiples, is {default}"
        )
    return tuple(float(value) / float(default) for value in values if value is not None)
