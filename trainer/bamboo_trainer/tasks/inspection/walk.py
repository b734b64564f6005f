"""A walk along a task's layers, each on the outputs of the one before, to find their costs, sizes and forms.

The layers run on tensors without data (torch's FakeTensorMode), which takes no memory and hardly any time, however
large they are. They run in a child process, because objects that a layer's code keeps, such as a table in a cache,
would have no data. If one cannot run so, because its control flow depends on values, all run for real, on the CPU.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.child import from_child
from bamboo_trainer.tasks.inspection.no_values import failing_quietly
from bamboo_trainer.tasks.inspection.operations import AllStepsAtOnce
from bamboo_trainer.tasks.mixed_precision import autocast, passed_on
from bamboo_trainer.tasks.user_code import build_layer, load_batch, run_layer
from bamboo_trainer.training import TrainingConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")
# (walk, number of a layer, its inputs) -> finding, and the outputs. Inputs may also be tuples of `Parts`.
Visit = Callable[["Walk", int, Any], tuple[T, Any]]


@dataclass(frozen=True, slots=True)
class Walk:
    """A way to run a task's layers: without data, within `mode`, or with data."""

    task: Task
    mode: FakeTensorMode | None = None

    @property
    def within(self) -> AbstractContextManager[object]:
        """The context in which to run a layer."""
        return self.mode or nullcontext()

    @property
    def quickly(self) -> AbstractContextManager[object]:
        """The context in which recurrent layers take hardly any time, if only the number of operations matters."""
        return AllStepsAtOnce() if self.mode else nullcontext()

    def layer(self, index: int) -> nn.Module:
        return layer_without_values(self.task, index, self.mode) if self.mode else build_layer(self.task, 0, index)

    def given(self, parts: Any) -> Any:
        """Return leaves with the form of these tensors, as inputs of this walk's layers."""
        return tree_map(self._leaf, parts)

    def _leaf(self, part: Tensor) -> Tensor:
        leaf = part.detach()
        return (self.mode.from_tensor(leaf) if self.mode else leaf).requires_grad_(part.requires_grad)

    def visits(self, visit: Visit[T], inputs: Any, layers: range) -> Iterator[T]:
        """Yield the findings of these layers. Raises a layer's own errors, including those for lack of data."""
        with failing_quietly():
            parts = self.given(inputs)
            for index in layers:
                seen, parts = visit(self, index, parts)
                yield seen
                parts = tree_map(lambda part: part.detach().requires_grad_(part.requires_grad), parts)


def look(task: Task, inputs: Any, visit: Visit[T]) -> tuple[T, ...]:
    """Return the finding of every layer. inputs: of the first one. Raises TaskError."""
    seen, problem = look_without_data(task, inputs, visit, range(len(task.layers)))
    if not problem:
        return tuple(seen)
    logger.info("the layers are run with data, since %s", problem)
    with torch.random.fork_rng(devices=[]):
        return tuple(Walk(task).visits(visit, inputs, range(len(task.layers))))


def look_without_data(task: Task, inputs: Any, visit: Visit[T], layers: range) -> tuple[list[T], str]:
    """Return the findings of the first of these layers, and why the others cannot run without data; "" if all can.

    inputs: of the first of them, with data.
    """
    walk = Walk(task, FakeTensorMode(allow_non_fake_inputs=True))  # created here, because its imports take a second
    return from_child(walk.visits(visit, inputs, layers))


def first_batch(task: Task, samples: int) -> tuple[Parts, Parts]:
    """Return inputs and targets of the first samples of the data, repeated if there are fewer."""
    length = len(task.dataset)
    return load_batch(task, [i % length for i in range(samples)])


def forward(task: Task, config: TrainingConfig, index: int, layer: nn.Module, inputs: Parts) -> Parts:
    """Return the layer's outputs in the job's precision, as inputs of the next layer."""
    with autocast(torch.device("cpu"), config.precision):
        outputs = run_layer(layer, index, inputs)
    return outputs if index == len(task.layers) - 1 else passed_on(outputs, config.boundary_dtype)


def layer_without_values(task: Task, index: int, mode: FakeTensorMode) -> nn.Module:
    """Return the layer without memory if possible; a factory that reads values from a file must be allowed to."""
    try:
        return build_layer(task, 0, index, mode)
    except Exception as error:
        logger.debug("layer %d is built with its values: %s", index, error)
    layer = build_layer(task, 0, index)
    with mode:
        return layer._apply(mode.from_tensor)  # type: ignore[no-any-return, no-untyped-call]
