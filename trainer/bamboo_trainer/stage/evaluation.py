"""A stage's forward for evaluation: in eval mode, without graphs, random state or changes."""

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import nn

from bamboo_trainer.data.order import pure_seed
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.evaluation import evaluated_samples, measured
from bamboo_trainer.tasks.losses import Sum
from bamboo_trainer.tasks.mixed_precision import REDUCED
from bamboo_trainer.tasks.reading.batch_reader import BatchReader
from bamboo_trainer.tasks.running_buffers import evaluating
from bamboo_trainer.tasks.user_code import load_batch, run_layer, seed_forward
from bamboo_trainer.training import TrainingConfig


class Evaluator:
    """Evaluates a stage's layers, given by number. last: this is the last stage of the pipeline."""

    def __init__(
        self, task: Task, config: TrainingConfig, layers: Mapping[int, nn.Module], device: torch.device, last: bool
    ) -> None:
        self._task, self._config, self._layers, self._device, self._last = task, config, layers, device, last

    def run(self, version: int, batch: int, inputs: Parts | None, reader: BatchReader) -> tuple[Parts, dict[str, Sum]]:
        """Return the stage's outputs; on the last stage (), and the sums measured on the batch.

        A pure function of the parameters and the batch. inputs: None on the first stage, which reads them.
        """
        samples, targets = 0, Parts()
        if inputs is None or self._last:
            read, targets, samples = self._read(batch, reader)
            inputs = read if inputs is None else inputs
        parts = tuple(p.to(self._device) for p in inputs)
        with torch.no_grad(), evaluating(self._layers.values()), _uncached(self._device, self._config.precision):
            for index, layer in self._layers.items():
                seed_forward(self._device, pure_seed("evaluation", self._config.seed, version, batch, index))
                parts = run_layer(layer, index, parts)
        if not self._last:
            return parts, {}
        with torch.no_grad():
            assert self._task.evaluation is not None
            on_device = tuple(p.to(self._device) for p in targets)
            return (), measured(self._task, self._task.evaluation, parts, on_device, samples)

    def _read(self, batch: int, reader: BatchReader) -> tuple[Parts, Parts, int]:
        """Return inputs, targets, and their number of samples."""
        assert self._task.evaluation is not None
        samples = evaluated_samples(self._task.evaluation, batch, self._config.micro_batch_size)
        with reader.quiet():
            inputs, targets = load_batch(self._task, samples, self._task.evaluation.dataset)
        return inputs, targets, len(samples)


def _uncached(device: torch.device, precision: str) -> "torch.autocast | nullcontext[None]":
    """Return autocast without a cache: casts made without a graph must not be found by a forward that needs one."""
    dtype = REDUCED.get(precision)
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False) if dtype else nullcontext()
