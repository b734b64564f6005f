"""The user's optimizer with the learning rate, and whatever else the task schedules; the same in a stage and in plain
training.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any, Final

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from bamboo_trainer.optimizers import Combined
from bamboo_trainer.tasks.phases import TaskInPhase
from bamboo_trainer.tasks.task_errors import TaskError, in_task

Value = float | tuple[float, ...]
RATE: Final = "lr"
# With these a schedule does not decide which tensors an optimizer remembers.
_HARMLESS: Final = frozenset({RATE, "betas", "weight_decay", "eps", "alpha", "rho", "lr_decay", "lambd"})
# Their steps leave gradients as they are. That of SGD does not, with foreach and nesterov.
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
# Their fused kernels compute each number from those of the same place and the step's count, of that parameter alone.
# SGD's is told once for all parameters whether momentum begins.
_FUSED: Final = (torch.optim.Adam, torch.optim.AdamW)


class ScheduledOptimizer:
    """The optimizer of a phase, or of a task without phases; versions are the job's. `inner` is None where there is
    nothing to train, as on a stage of activation functions only. factor: of the learning rate, as the task's decisions
    have it.
    """

    def __init__(self, phase: TaskInPhase, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """named: parameters of a stage; those that the phase trains are the optimizer's."""
        self.phase = phase
        trained = [(name, parameter) for name, parameter in named if phase.trains(name)]
        self.inner = _build(phase, trained) if trained else None
        self._learning_rate, self.factor = phase.task.learning_rate, 1.0
        self._schedules = _schedules(phase)
        names = (RATE, *self._schedules)
        self._multipliers = {} if self.inner is None else {n: _multipliers(self.inner, n, phase.said) for n in names}

    @property
    def scheduled(self) -> frozenset[str]:
        """The keys of parameter groups that are set at each step, and so are not a part of the optimizer's state."""
        return frozenset((RATE, *self._schedules))

    @property
    def keeps_its_names(self) -> bool:
        """Is what it remembers of a parameter decided when it is built, whatever the schedules say?"""
        return self.scheduled <= _HARMLESS

    @property
    def only_reads(self) -> bool:
        """Is it certain that a step leaves the gradients as they are? A hook of the task may clip them."""
        return self.inner is not None and type(self.inner) in _READING and not _is_hooked(self.inner)

    def fuse(self) -> None:
        """As `fuse`, before the first step."""
        if self.inner is not None:
            fuse(self.inner)

    def learning_rate(self, version: int) -> float:
        """The task's, of the step that begins at this version, times the factor. Raises TaskError if it is none."""
        own = self.phase.own(version)
        asked = f"{self.phase.said}.learning_rate({own})"
        with in_task(asked):
            rate = float(self._learning_rate(own))
        if not (math.isfinite(rate) and rate >= 0):
            raise TaskError(f"{asked} returned {rate}, expected a finite number that is not negative")
        return rate * self.factor

    def settings(self, version: int) -> dict[str, Value]:
        """The settings of the step that begins at this version: the rate, and whatever else is scheduled. Raises
        TaskError.
        """
        found: dict[str, Value] = {RATE: self.learning_rate(version)}
        if self.inner is not None:
            own = self.phase.own(version)
            for name, schedule in self._schedules.items():
                asked = f"{self.phase.said}.schedules[{name!r}]({own})"
                with in_task(asked):
                    value = schedule(own)
                found[name] = _checked(asked, value, self.inner.defaults[name])
        return found

    def step(self, version: int) -> None:
        """Takes the parameters, whose gradients are set, from this version to the next."""
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


class PhaseOptimizers:
    """The optimizers of a stage, one for each of a task's phases."""

    def __init__(self, phases: Sequence[TaskInPhase], named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """named: the stage's parameters."""
        self.all = tuple(ScheduledOptimizer(phase, named) for phase in phases)

    def fuse(self) -> None:
        """As `fuse`, before the first step."""
        for one in self.all:
            one.fuse()

    def at(self, version: int) -> ScheduledOptimizer:
        """The one whose step begins at that version."""
        return next(one for one in self.all if one.phase.has(version))


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Have torch's fused kernel update the parameter groups whose kernel the task leaves open, before the first step.

    A kernel that walks over memory wants it without gaps, which it does not check.
    """
    for one in optimizer.parts if isinstance(optimizer, Combined) else (optimizer,):
        for group in one.param_groups if type(one) in _FUSED and "step" not in vars(one) else ():
            if leaves_kernel_open(group) and all(parameter.is_contiguous() for parameter in group["params"]):
                group["fused"] = True


def leaves_kernel_open(group: Mapping[str, Any]) -> bool:
    """Does the task say nothing of what decides it? group: as it was built."""
    said = (group.get("fused"), group.get("foreach"))
    return said == (None, None) and not group.get("differentiable") and not group.get("capturable")


def _build(phase: TaskInPhase, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    made = f"{phase.said}.optimizer"
    with in_task(made):
        optimizer = phase.task.optimizer(named)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(f"{made} returned {type(optimizer).__name__}, expected a torch.optim.Optimizer")
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise TaskError(
            f"{made} returned {type(optimizer).__name__}, whose step computes losses again by a closure; "
            "expected an optimizer that takes a step from the gradients alone, such as AdamW"
        )
    for inner in _held(vars(optimizer).values()):
        if inner.state is not optimizer.state:
            raise TaskError(
                f"{made} returned {type(optimizer).__name__}, which keeps what it remembers in another "
                f"optimizer ({type(inner).__name__}), where no replica would get it; "
                "bamboo_trainer.optimizers.Combined makes one of several"
            )
    return optimizer


def _is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Does anything run with its step but the step of its class?"""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    everybodys = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    return any(own) or any(everybodys) or "step" in vars(optimizer)


def _held(values: Iterable[object]) -> Iterator[torch.optim.Optimizer]:
    """Optimizers among these, or in lists and dictionaries among them."""
    for value in values:
        if isinstance(value, torch.optim.Optimizer):
            yield value
        elif isinstance(value, list | tuple):
            yield from (one for one in value if isinstance(one, torch.optim.Optimizer))
        elif isinstance(value, dict):
            yield from (one for one in value.values() if isinstance(one, torch.optim.Optimizer))


def _schedules(phase: TaskInPhase) -> dict[str, Callable[[int], Any]]:
    """The schedules by the key of parameter groups. Raises TaskError if they cannot be that."""
    given = phase.task.schedules
    if not isinstance(given, Mapping) or not all(isinstance(k, str) and callable(v) for k, v in given.items()):
        raise TaskError(
            f'{phase.said}.schedules must be a mapping from names such as "momentum" to functions of the step'
        )
    if RATE in given:
        raise TaskError(f'{phase.said}.schedules names "lr", whose schedule is {phase.said}.learning_rate')
    return dict(sorted(given.items()))


def _checked(asked: str, value: object, default: object) -> Value:
    """The value of a schedule: a number, or as many as the default has. Raises TaskError."""
    wanted = len(default) if isinstance(default, tuple | list) else None
    values = tuple(value) if wanted and isinstance(value, tuple | list) else (value,)
    numbers = tuple(float(v) for v in values if isinstance(v, int | float) and math.isfinite(v))
    if len(numbers) != len(values) or len(numbers) != (wanted or 1):
        expected = f"{wanted} finite numbers" if wanted else "a finite number"
        raise TaskError(f"{asked} returned {value!r}, expected {expected}")
    return numbers if wanted else numbers[0]


def _multipliers(optimizer: torch.optim.Optimizer, name: str, said: str) -> tuple[float, ...]:
    """Each group's own value over the optimizer's default one; to be asked before a step changes them. said: whose it
    is, in a sentence.
    """
    if name != RATE and name not in optimizer.defaults:
        known = ", ".join(sorted(k for k, v in optimizer.defaults.items() if isinstance(v, int | float | tuple)))
        raise TaskError(
            f"{said}.schedules names {name!r}, which {type(optimizer).__name__} does not have; it has {known}"
        )
    default = optimizer.defaults.get(name)
    values = [group.get(name, default) for group in optimizer.param_groups]
    if all(value == default for value in values):
        return (1.0,) * len(values)
    what = "a learning rate" if name == RATE else f"{name} values"
    if not isinstance(default, int | float | torch.Tensor) or not default > 0:
        raise TaskError(
            f"{said}.optimizer gives parameter groups {what} of their own ({', '.join(map(str, values))}), "
            f"but the optimizer's default, of which they are multiples, is {default}"
        )
    return tuple(float(value) / float(default) for value in values if value is not None)
