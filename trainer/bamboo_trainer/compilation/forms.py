"""What a task's layers are given: shapes and types, found without computing anything."""

from collections.abc import Iterator
from typing import cast

import msgspec
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.child import lines_of_child
from bamboo_trainer.tasks.inspection.costs import layer_without_values
from bamboo_trainer.tasks.inspection.no_values import failing_quietly
from bamboo_trainer.tasks.mixed_precision import autocast, passed_on
from bamboo_trainer.tasks.user_code import load_batch, run_layer
from bamboo_trainer.training import TrainingConfig


class InputForm(msgspec.Struct, frozen=True):
    """The form of a tensor."""

    shape: tuple[int, ...]
    dtype: str  # as torch calls it
    needs: bool  # is a gradient computed for it?

    def zeros(self, device: torch.device) -> Tensor:
        made = torch.zeros(self.shape, dtype=getattr(torch, self.dtype), device=device)
        return made.requires_grad_(self.needs)


def input_forms(task: Task, config: TrainingConfig, end: int) -> dict[int, tuple[InputForm, ...]]:
    """The forms of the inputs of the layers up to that one, by layer; of fewer, if one cannot be run without data.

    In a child process, as what a layer's code remembers in passing would have no data.
    """
    length = len(task.dataset)
    inputs, _ = load_batch(task, [i % length for i in range(config.micro_batch_size)])
    lines, _ = lines_of_child(msgspec.json.encode(forms).decode() for forms in _walk(task, config, inputs, end))
    return {index: msgspec.json.decode(line, type=tuple[InputForm, ...]) for index, line in enumerate(lines)}


def _walk(task: Task, config: TrainingConfig, inputs: Parts, end: int) -> Iterator[tuple[InputForm, ...]]:
    """Raises whatever a layer raises because there are no data, or anyway."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        parts = tuple(cast(Tensor, mode.from_tensor(p.detach())) for p in inputs)
    for index in range(end):
        yield tuple(InputForm(tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad) for p in parts)
        layer = layer_without_values(task, index, mode)
        with mode, failing_quietly(), autocast(torch.device("cpu"), config.precision):
            given = tuple(p.detach().requires_grad_(p.requires_grad) for p in parts)
            parts = passed_on(run_layer(layer, index, given), config.boundary_dtype)
