"""A forward of one microbatch, and its runner, layer by layer."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from bamboo_trainer.memory.estimate import checkpointed_layers, recomputing
from bamboo_trainer.memory.host_copies import Bring
from bamboo_trainer.stage.compilation import CompiledLayers, input_forms
from bamboo_trainer.stage.parameters import Cut, FlatParameters
from bamboo_trainer.task import Parts, Sum, Task
from bamboo_trainer.tasks.inspection import Draws
from bamboo_trainer.tasks.mixed_precision import (
    REDUCED,
    as_passed_on,
    autocast,
    autocast_and_keep,
    cast_back_at_once,
    passed_on,
)
from bamboo_trainer.tasks.running_buffers import Capture, capturing
from bamboo_trainer.tasks.user_code import call_layer, forward_seed, run_layer, seed_forward, task_loss, task_metrics
from bamboo_trainer.training import TrainingConfig

Metrics = dict[str, Sum]


@dataclass(slots=True, eq=False)
class Forwarding:
    """A forward in progress; `parts` are the outputs so far, at the end the stage's or the loss."""

    step: int
    microbatch: int
    leaves: Parts
    parts: Parts
    layer: int  # the next one
    end: int
    targets: Parts | None = None  # if they were read with the inputs
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
    """Runs forwards of a stage's layers, given by number. load: returns the inputs and targets of a step's microbatch.
    bring: copies to the device. The bits of a forward depend only on the parameters, the seed, step, microbatch and
    inputs.
    """

    def __init__(
        self,
        task: Task,
        config: TrainingConfig,
        layers: Mapping[int, nn.Module],
        parameters: FlatParameters,
        device: torch.device,
        load: Callable[[int, int], tuple[Parts, Parts]],
        bring: Bring,
    ) -> None:
        self._task, self._config, self._load, self._bring = task, config, load, bring
        self._layers, self._device = layers, device
        self._first, self._end = min(layers), max(layers) + 1
        self._last = self._end == len(task.layers)
        self._checkpointed = checkpointed_layers(task)
        self._reduces = config.precision in REDUCED
        self._compiled = CompiledLayers(layers, deterministic=config.deterministic) if config.compile else None
        if self._compiled:
            forms = input_forms(task, config, self._end)
            self._compiled.compile_ahead(forms, device, lambda index, given: self._call(index, 0, given))
        self._seeds: dict[tuple[int, int], tuple[int, ...]] = {}  # of the layers, by step and microbatch
        self._cut_at = frozenset(bucket.layer for bucket in parameters.buckets) - {self._first}

    @property
    def compile_seconds(self) -> float:
        """The seconds that compiling the layers took, before the first forward."""
        return self._compiled.seconds if self._compiled else 0.0

    @property
    def repeats(self) -> bool:
        """Whether the backward runs some of the layers again."""
        return not self._checkpointed.isdisjoint(self._layers)

    def expect(self, step: int, microbatches: Iterable[int]) -> None:
        """Compute the seeds of a step's forwards at once: a fraction of the time that it takes one by one, between
        layers. Other forwards compute their own.
        """
        known = {place: seeds for place, seeds in self._seeds.items() if place[0] == step}
        self._seeds = known | {(step, m): self._seeds_of(step, m) for m in microbatches}

    def _seeds_of(self, step: int, microbatch: int) -> tuple[int, ...]:
        return tuple([forward_seed(self._config.seed, step, microbatch, index) for index in self._layers])

    def start(self, step: int, microbatch: int, inputs: Parts | None) -> Forwarding:
        """Return a forward that has run no layer yet. inputs: require a gradient if one goes back for them."""
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
        """Run one more layer; after the last one of the model, the loss."""
        self.run(forwarding, forwarding.layer + 1)

    def run(self, forwarding: Forwarding, end: int) -> None:
        """Run the layers up to `end`; after the last one of the model, the loss."""
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
        """Run a layer's forward with all that its bits depend on. capture: gets what norms see."""
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
