"""Forwards of a stage's layers, in training (`ForwardRunner`) and of evaluation batches (`Evaluator`)."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from bamboo_trainer.data.order import pure_seed
from bamboo_trainer.memory.estimate import checkpointed_layers, recomputing
from bamboo_trainer.memory.host_copies import Bring
from bamboo_trainer.stage.compilation import CompiledLayers, input_forms
from bamboo_trainer.stage.parameters import Cut
from bamboo_trainer.stage.values import StageValues
from bamboo_trainer.task import Parts, Sum, Task
from bamboo_trainer.tasks.evaluation import evaluated_samples, measured
from bamboo_trainer.tasks.inspection import Draws
from bamboo_trainer.tasks.mixed_precision import (
    REDUCED,
    as_passed_on,
    autocast,
    autocast_and_keep,
    cast_back_at_once,
    passed_on,
)
from bamboo_trainer.tasks.readers import BatchReader
from bamboo_trainer.tasks.running_buffers import Capture, capturing, evaluating
from bamboo_trainer.tasks.user_code import (
    call_layer,
    forward_seed,
    load_batch,
    run_layer,
    seed_forward,
    task_loss,
    task_metrics,
)

Metrics = dict[str, Sum]


@dataclass(slots=True, eq=False)
class Forwarding:
    """A forward in progress.

    parts: first the stage's inputs (`leaves`), then the newest layer's outputs; after the model's last layer, the loss.
    """

    step: int
    microbatch: int
    leaves: Parts
    parts: Parts
    layer: int  # the next one
    end: int
    targets: Parts | None = None  # on the model's last stage, once they are read
    capture: Capture = field(default_factory=Capture)  # losses and contributions of the layers
    weight: float | None = None  # of the loss, if it is a sum
    metrics: Metrics = field(default_factory=dict)
    draws: Mapping[int, Draws] = field(default_factory=dict)  # of each layer, if they are recorded
    cuts: list[Cut] | None = None  # where buckets of layers begin, for a backward bucket by bucket; or None

    @property
    def done(self) -> bool:
        return self.layer == self.end

    def measure(self, task: Task, targets: Parts) -> None:
        """Compute loss and metrics after the model's last layer. Raises TaskError."""
        self.metrics = task_metrics(task, self.parts, targets)
        total, self.weight = task_loss(task, self.parts, targets)
        self.parts = (total,)


class ForwardRunner:
    """The runner of a stage's forwards, whole or layer by layer.

    A forward seeds torch's global generators before each layer, so a repeated forward draws the same numbers from them.
    """

    def __init__(self, values: StageValues, reader: BatchReader, bring: Bring) -> None:
        """Create the runner. If the job compiles layers, try to do so ahead. bring: copies tensors to the device."""
        task, config = values.task, values.config
        self._task, self._config, self._load, self._bring = task, config, partial(reader.batch, values.index), bring
        self._layers, self._device = values.layers, values.device
        self._first, self._end, self._last = values.first, values.end, values.last
        self._checkpointed = checkpointed_layers(task)
        self._reduces = config.precision in REDUCED
        self._compiled = CompiledLayers(self._layers, deterministic=config.deterministic) if config.compile else None
        if self._compiled:
            forms = input_forms(task, config, values.end)
            self._compiled.compile_ahead(forms, self._device, lambda index, given: self._call(index, 0, given))
        self._seeds: dict[tuple[int, int], tuple[int, ...]] = {}  # of the layers, by step and microbatch
        self._cut_at = frozenset(bucket.layer for bucket in values.parameters.buckets) - {self._first}

    @property
    def compile_seconds(self) -> float:
        """The seconds that compiling layers in the constructor took; 0 if the job compiles no layers."""
        return self._compiled.seconds if self._compiled else 0.0

    @property
    def repeats(self) -> bool:
        """Whether the task marks some of the layers for activation checkpointing: backwards run these again."""
        return not self._checkpointed.isdisjoint(self._layers)

    def expect(self, step: int, microbatches: Iterable[int]) -> None:
        """Compute the random seeds of a step's forwards ahead, and forget those of other steps. A forward for which no
        seeds are computed ahead computes its own.
        """
        known = {place: seeds for place, seeds in self._seeds.items() if place[0] == step}
        self._seeds = known | {(step, m): self._seeds_of(step, m) for m in microbatches}

    def _seeds_of(self, step: int, microbatch: int) -> tuple[int, ...]:
        return tuple([forward_seed(self._config.seed, step, microbatch, index) for index in self._layers])

    def start(self, step: int, microbatch: int, inputs: Parts | None) -> Forwarding:
        """Return a forward that has run no layer yet. inputs: None on the first stage, which loads its data."""
        assert (inputs is None) == (self._first == 0)
        targets = None
        if inputs is None:
            read, read_targets = self._load(step, microbatch)
            leaves, targets = self._bring(read), read_targets if self._last else None
        else:
            pairs = zip(self._bring(inputs), inputs, strict=True)
            leaves = tuple([part.detach().requires_grad_(given.requires_grad) for part, given in pairs])
        return Forwarding(step, microbatch, leaves, leaves, self._first, self._end, targets)

    def advance(self, forwarding: Forwarding) -> None:
        """Run the next layer. After the model's last layer, compute the loss and the metrics, too."""
        self.run(forwarding, forwarding.layer + 1)

    def run(self, forwarding: Forwarding, end: int) -> None:
        """Run the remaining layers before `end`. After the model's last layer, also compute loss and metrics."""
        with nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
            self._run(forwarding, end)

    def _run(self, f: Forwarding, end: int) -> None:
        seeds = self._seeds.get((f.step, f.microbatch)) or self._seeds_of(f.step, f.microbatch)
        with capturing(f.capture):
            for index in range(f.layer, end):
                if f.cuts is not None and index in self._cut_at:
                    f.cuts.append(Cut.at(f.parts, len(f.capture.losses)))
                    f.parts = as_passed_on(f.cuts[-1].leaves)
                elif index == self._first:
                    f.parts = as_passed_on(f.parts)
                seed = seeds[index - self._first]
                call: Callable[[Any], Any] = partial(self._call, index, seed)
                if index in self._checkpointed:
                    call = recomputing(partial(self.call, index, seed, capture=f.capture))
                with f.draws[index].watched() if f.draws else nullcontext():
                    f.parts = run_layer(self._layers[index], index, f.parts, call, ends_stage=index + 1 == f.end)
                f.layer += 1
        if f.done:
            f.capture.close()
            if self._last:
                targets = self._load(f.step, f.microbatch)[1] if f.targets is None else f.targets
                f.targets = self._bring(targets)
                f.measure(self._task, f.targets)

    def call(self, index: int, seed: int, given: Any, capture: Capture) -> Any:
        """Run a checkpointed layer with this seed. The backward repeats the call, when `capture` is already closed."""
        with capturing(capture):
            return self._call(index, seed, given)

    def _call(self, index: int, seed: int, given: Any) -> Any:
        seed_forward(self._device, seed)
        if not self._reduces:
            return self._layer(index, given)
        keeps = index not in self._checkpointed
        with (autocast_and_keep if keeps else autocast)(self._device, self._config.precision):
            result = self._layer(index, given)
        if keeps:
            cast_back_at_once(self._layers[index], given, result)
        last = index == len(self._task.layers) - 1
        return result if last else passed_on(result, self._config.boundary_dtype)

    def _layer(self, index: int, given: Any) -> Any:
        return self._compiled.call(index, given) if self._compiled else call_layer(self._layers[index], given)


class Evaluator:
    """The runner of evaluation batches through a stage's layers, in eval mode and without gradients."""

    def __init__(self, values: StageValues, reader: BatchReader) -> None:
        self._values, self._reader = values, reader
        self._task, self._config, self._device = values.task, values.config, values.device

    def run(self, batch: int, inputs: Parts | None) -> tuple[Parts, dict[str, Sum]]:
        """Run an evaluation batch. Return (outputs, {}), or on the last stage ((), the sums of loss and metrics).
        batch: its number in the evaluation. inputs: None on the first stage, which reads them. Raises TaskError.
        """
        values, samples, targets = self._values, 0, Parts()
        if inputs is None or values.last:
            read, targets, samples = self._read(batch)
            inputs = read if inputs is None else inputs
        parts = tuple(p.to(self._device) for p in inputs)
        with torch.no_grad(), evaluating(values.layers.values()), _uncached(self._device, self._config.precision):
            for index, layer in values.layers.items():
                seed_forward(self._device, pure_seed("evaluation", self._config.seed, values.version, batch, index))
                parts = run_layer(layer, index, parts)
        if not values.last:
            return parts, {}
        with torch.no_grad():
            assert self._task.evaluation is not None
            on_device = tuple(p.to(self._device) for p in targets)
            return (), measured(self._task, self._task.evaluation, parts, on_device, samples)

    def _read(self, batch: int) -> tuple[Parts, Parts, int]:
        """Return an evaluation batch's inputs, targets, and number of samples."""
        assert self._task.evaluation is not None
        samples = evaluated_samples(self._task.evaluation, batch, self._config.micro_batch_size)
        with self._reader.quiet():
            inputs, targets = load_batch(self._task, samples, self._task.evaluation.dataset)
        return inputs, targets, len(samples)


def _uncached(device: torch.device, precision: str) -> "torch.autocast | nullcontext[None]":
    """Return autocast without a cache, so that training reuses no casts without a graph; for fp32, a null context."""
    dtype = REDUCED.get(precision)
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False) if dtype else nullcontext()
