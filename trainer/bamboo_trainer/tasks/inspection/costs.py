"""Costs of a task's layers, for splitting them evenly over stages: counted, not timed, and without computing.

A layer runs without data (see `walk`), forward and backward. A layer whose control flow depends on values cannot: it
runs for real, on the CPU, forward only, and so do the layers before it, whose outputs it needs.
"""

import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from bamboo_core.job.spec import JobSpec
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.inspection.operations import OPERATIONS_PER_BYTE, Operations
from bamboo_trainer.tasks.inspection.walk import Walk, first_batch, look_without_data
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import run_layer

logger = logging.getLogger(__name__)

MOST_COST: Final = 1e24  # limit of the control channel
GRADIENT_TRAFFIC: Final = 3 * 4  # bytes per parameter: reads of a microbatch's gradient and of the sum, and its write
BACKWARD: Final = 2  # cost of a backward in forwards, where only the forward was run


def profile(task: Task, spec: JobSpec) -> tuple[float, ...]:
    """Return the costs by which the coordinator splits the layers; only their number counts if the split is given."""
    if spec.topology.split is not None:
        return (1.0,) * len(task.layers)
    return layer_costs(task, spec.training.micro_batch_size)


def layer_costs(task: Task, micro_batch_size: int) -> tuple[float, ...]:
    """Return each layer's operations in one microbatch's forward and backward, at least 1, or the task's own costs.

    Equal for every worker. Raises TaskError if a layer cannot run at all.
    """
    if task.costs is not None:
        return stated_costs(task, task.costs)
    (inputs, _), count = first_batch(task, micro_batch_size), len(task.layers)
    costs: list[float] = []
    while len(costs) < count:
        begin = len(costs)
        counted, problem = look_without_data(task, inputs, _cost, range(begin, count))
        costs += counted
        if len(costs) == count:
            break
        real = Walk(task).visits(_real_cost, inputs, range(begin, len(costs) + 1))
        with torch.random.fork_rng(devices=[]):
            cost, inputs = deque(real, maxlen=1).pop()
        logger.warning("the cost of layer %d was counted by running it for real, since %s", len(costs), problem)
        costs.append(cost)
    return tuple(max(1.0, cost) for cost in costs)


def stated_costs(task: Task, costs: Sequence[float]) -> tuple[float, ...]:
    """Return the costs in `Task.costs`. Raises TaskError unless they are one number for each layer."""
    if isinstance(costs, str) or not isinstance(costs, Sequence) or len(costs) != len(task.layers):
        found = f"{len(costs)}" if isinstance(costs, Sequence) else type(costs).__name__
        raise TaskError(f"Task.costs: expected one number for each of the {len(task.layers)} layers, got {found}")
    for index, cost in enumerate(costs):
        number = isinstance(cost, int | float) and not isinstance(cost, bool)
        if not number or not math.isfinite(cost) or not 0 <= cost <= MOST_COST:
            raise TaskError(f"Task.costs[{index}]: expected a number from 0 to {MOST_COST:g}, got {cost!r}")
    return tuple(map(float, costs))


def _cost(walk: Walk, index: int, inputs: Parts) -> tuple[float, Parts]:
    layer = walk.layer(index)
    with walk.within, walk.quickly, Operations() as operations:
        outputs = run_layer(layer, index, inputs)
        if ends := [p for p in outputs if p.requires_grad]:
            torch.autograd.backward(ends, [torch.empty_like(p) for p in ends])
    return float(operations.total + _gradients(layer)), outputs


def _real_cost(walk: Walk, index: int, inputs: Parts) -> tuple[tuple[float, Parts], Parts]:
    """Return the cost, and twice the inputs of the next layer, which are marked if they have a gradient."""
    layer = walk.layer(index)
    with torch.no_grad(), Operations() as operations:
        outputs = run_layer(layer, index, inputs)
    trained = any(p.requires_grad for p in (*inputs, *layer.parameters()))
    outputs = tuple(p.detach().requires_grad_(trained and p.is_floating_point()) for p in outputs)
    return (float(operations.total * (1 + BACKWARD * trained) + _gradients(layer)), outputs), outputs


def _gradients(layer: nn.Module) -> int:
    """Return the cost of adding up gradients."""
    trained = sum(p.numel() for p in layer.parameters() if p.requires_grad)
    return OPERATIONS_PER_BYTE * GRADIENT_TRAFFIC * trained
