"""Forms of the inputs of a task's layers: shapes and dtypes, found without computing."""

from typing import NamedTuple

import torch
from torch import Tensor

from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.inspection.walk import Walk, first_batch, forward, look_without_data
from bamboo_trainer.tasks.mixed_precision import rounded
from bamboo_trainer.training import TrainingConfig


class InputForm(NamedTuple):
    """The form of a tensor."""

    shape: tuple[int, ...]
    dtype: str  # torch's name
    needs: bool  # whether a gradient is computed for it

    def zeros(self, device: torch.device) -> Tensor:
        made = torch.zeros(self.shape, dtype=getattr(torch, self.dtype), device=device)
        return made.requires_grad_(self.needs)


def input_forms(task: Task, config: TrainingConfig, end: int) -> dict[int, tuple[InputForm, ...]]:
    """Return the forms of each layer's inputs up to layer `end`; of fewer if a layer cannot run without data."""

    def outputs(walk: Walk, index: int, inputs: Parts) -> tuple[tuple[InputForm, ...], Parts]:
        layer = rounded(walk.layer(index), config.parameter_dtype)
        with walk.within:
            parts = forward(task, config, index, layer, inputs)
        return _forms(parts), parts

    inputs, _ = first_batch(task, config.micro_batch_size)
    seen, _ = look_without_data(task, inputs, outputs, range(end - 1))
    return dict(enumerate([_forms(inputs), *seen]))


def _forms(parts: Parts) -> tuple[InputForm, ...]:
    return tuple(InputForm(tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad) for p in parts)
