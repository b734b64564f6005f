"""What a task's layers cost, so that its stages cost the same: counted, not timed, and without computing anything.

A layer is built and run on tensors that have a form and no data (torch's FakeTensorMode), forward and backward. That
takes no memory and next to no time, however large the layer is. One whose way depends on values cannot be run so; it is
run for real, on the CPU, forward only, and so are those before it, whose outputs it needs.

It is done in a child process: what a layer's code remembers in passing, as a table in a cache, would have no data.
"""

import logging
import math
from collections.abc import Sequence
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bamboo_core.job.spec import JobSpec
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.child import lines_of_child
from bamboo_trainer.tasks.inspection.no_values import failing_quietly
from bamboo_trainer.tasks.inspection.operations import OPERATIONS_PER_BYTE, AllStepsAtOnce, Operations
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import build_layer, load_batch, run_layer

logger = logging.getLogger(__name__)

MOST_COST: Final = 1e24  # what the control channel takes
GRADIENT_TRAFFIC: Final = 3 * 4  # bytes for each parameter: a microbatch's gradient and the sum are read, it is written
BACKWARD: Final = 2  # times a forward, where only that was run


def profile(task: Task, spec: JobSpec) -> tuple[float, ...]:
    """What the coordinator splits the layers by. If the manifest says how to split them, only their number matters."""
    if spec.topology.split is not None:
        return (1.0,) * len(task.layers)
    return layer_costs(task, spec.training.micro_batch_size)


def layer_costs(task: Task, micro_batch_size: int) -> tuple[float, ...]:
    """Each layer's operations in one microbatch's forward and backward, at least 1; or what the task says.

    The same for every worker that asks. Raises TaskError if a layer cannot be run at all.
    """
    if task.costs is not None:
        return stated_costs(task, task.costs)
    run = _RealRun(task, micro_batch_size)
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # made here, because it takes a second of imports
    costs: list[float] = []
    while len(costs) < len(task.layers):
        imagined, left = Imagined(task, len(costs), run, mode), len(task.layers) - len(costs)
        counted, problem = lines_of_child(str(imagined.cost()) for _ in range(left))
        costs += map(float, counted)
        if len(costs) < len(task.layers):
            index = len(costs)
            costs.append(float(run.cost(index)))
            logger.warning("the cost of layer %d was counted by running it for real, since %s", index, problem)
    return tuple(max(1.0, cost) for cost in costs)


def stated_costs(task: Task, costs: Sequence[float]) -> tuple[float, ...]:
    """What `Task.costs` says; TaskError if it is not one number for each layer."""
    if isinstance(costs, str) or not isinstance(costs, Sequence) or len(costs) != len(task.layers):
        found = f"{len(costs)}" if isinstance(costs, Sequence) else type(costs).__name__
        raise TaskError(f"Task.costs: expected one number for each of the {len(task.layers)} layers, got {found}")
    for index, cost in enumerate(costs):
        number = isinstance(cost, int | float) and not isinstance(cost, bool)
        if not number or not math.isfinite(cost) or not 0 <= cost <= MOST_COST:
            raise TaskError(f"Task.costs[{index}]: expected a number from 0 to {MOST_COST:g}, got {cost!r}")
    return tuple(map(float, costs))


class _RealRun:
    """Layers run for real, one after the other, as far as anybody asks. parts: the inputs of layer `next`. trained: is
    anything in front of it?
    """

    def __init__(self, task: Task, micro_batch_size: int) -> None:
        self._task = task
        length = len(task.dataset)
        self.parts, _ = load_batch(task, [i % length for i in range(micro_batch_size)])
        self.next, self.trained = 0, False

    def cost(self, index: int) -> int:
        """The cost of that layer, found by running it after those before it."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            while self.next <= index:
                layer = build_layer(self._task, 0, self.next)
                with Operations() as operations:
                    self.parts = run_layer(layer, self.next, self.parts)
                self.next += 1
                self.trained = self.trained or any(p.requires_grad for p in layer.parameters())
        return operations.total * (1 + BACKWARD * self.trained) + _gradients(layer)


def _gradients(layer: nn.Module) -> int:
    """What it costs to add up gradients."""
    trained = sum(p.numel() for p in layer.parameters() if p.requires_grad)
    return OPERATIONS_PER_BYTE * GRADIENT_TRAFFIC * trained


# without data


class Imagined:
    """Layers run one after the other on tensors without data."""

    def __init__(self, task: Task, index: int, before: _RealRun, mode: FakeTensorMode) -> None:
        """before: has come to layer `index`, the first to be run."""
        self._task, self._next, self._parts, self._mode = task, index, before.parts, mode
        self._needed = [part.is_floating_point() and before.trained for part in before.parts]  # a gradient

    def cost(self) -> int:
        """The cost of the next layer. Raises whatever it raises because there are no data, or anyway."""
        index, layer = self._next, layer_without_values(self._task, self._next, self._mode)
        with self._mode, failing_quietly():
            blank = [cast(Tensor, self._mode.from_tensor(p.detach())) for p in self._parts]
            given = tuple(p.requires_grad_(need) for p, need in zip(blank, self._needed, strict=True))
            with AllStepsAtOnce(), Operations() as operations:
                outputs = run_layer(layer, index, given)
                ends = [p for p in outputs if p.requires_grad]
                if ends:
                    torch.autograd.backward(ends, [torch.empty_like(p) for p in ends])
            self._parts, self._needed = tuple(p.detach() for p in outputs), [p.requires_grad for p in outputs]
        self._next += 1
        return operations.total + _gradients(layer)


def layer_without_values(task: Task, index: int, mode: FakeTensorMode) -> nn.Module:
    """The layer without memory, if it can be made so; a factory that reads values from a file has to be let do so."""
    try:
        return build_layer(task, 0, index, mode)
    except Exception as error:
        logger.debug("layer %d is built with its values: %s", index, error)
    layer = build_layer(task, 0, index)
    with mode:
        return layer._apply(mode.from_tensor)  # type: ignore[no-any-return, no-untyped-call]
