"""The user's optimizer on the task's learning rate; the same in a stage and in plain training."""

from collections.abc import Sequence

import torch
from torch import nn

from bamboo_trainer.task import Task
from bamboo_trainer.tasks.task_errors import TaskError, in_task


class ScheduledOptimizer:
    """`inner` is None where there is nothing to train, as on a stage of activation functions only."""

    def __init__(self, task: Task, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.inner = _build(task, named) if named else None
        self._learning_rate = task.learning_rate
        self._multipliers = () if self.inner is None else _rate_multipliers(self.inner)

    def learning_rate(self, version: int) -> float:
        """The task's, of the step that begins at this version."""
        with in_task(f"task.learning_rate, asked for step {version},"):
            return float(self._learning_rate(version))

    def step(self, version: int) -> None:
        """Takes the parameters, whose gradients are set, from this version to the next."""
        if self.inner is None:
            return
        rate = self.learning_rate(version)
        for group, multiplier in zip(self.inner.param_groups, self._multipliers, strict=True):
            group["lr"] = rate * multiplier
        with in_task(f"the optimizer ({type(self.inner).__name__}), in step {version},"):
            self.inner.step()


def _build(task: Task, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    with in_task("task.optimizer"):
        optimizer = task.optimizer(named)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(f"task.optimizer returned {type(optimizer).__name__}, expected a torch.optim.Optimizer")
    return optimizer


def _rate_multipliers(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """Each group's own lr over the optimizer's default one; to be asked before a step changes them."""
    default = optimizer.defaults.get("lr")
    rates = [group.get("lr", default) for group in optimizer.param_groups]
    if all(rate == default for rate in rates):
        return (1.0,) * len(rates)
    if not isinstance(default, int | float | torch.Tensor) or not default > 0:
        raise TaskError(
            f"task.optimizer gives parameter groups a learning rate of their own ({', '.join(map(str, rates))}), "
            f"but the optimizer's default, of which they are multiples, is {default}"
        )
    return tuple(float(rate) / float(default) for rate in rates if rate is not None)
