"""Metrics and evaluation, tried once before a job runs: what would end it at its first evaluation is told at once.

Layers are run forward on tensors that have a form and no data, in a child process as `costs` does; metrics are then
given zeros of that form. If anything raises so, the layers are run with data, and what raises then is told.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bamboo_core.job.spec import JobSpec
from bamboo_trainer.memory.estimate import rounded
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.child import lines_of_child
from bamboo_trainer.tasks.evaluation import evaluated_samples, evaluation_schedule, measured
from bamboo_trainer.tasks.inspection.costs import layer_without_values
from bamboo_trainer.tasks.mixed_precision import autocast, passed_on
from bamboo_trainer.tasks.running_buffers import evaluating
from bamboo_trainer.tasks.user_code import build_layer, dataset_length, load_batch, run_layer, task_metrics
from bamboo_trainer.training import TrainingConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """evaluated: it is one of an evaluation, not of a step."""

    inputs: Parts
    targets: Parts
    samples: int
    evaluated: bool


def try_measurements(task: Task, spec: JobSpec) -> None:
    """Calls each metric of a step and of the evaluations that the job asks for. Raises TaskError for one that fails."""
    batches = list(_batches(task, spec))
    if not batches:
        return
    _, problem = lines_of_child(str(layer) for layer in _without_data(task, spec, batches))
    if not problem:
        return
    logger.info("metrics and evaluation are tried with data, since %s", problem)
    with torch.random.fork_rng(devices=[]):
        for _ in _tried(task, spec, batches, lambda index: build_layer(task, 0, index), nullcontext()):
            pass


def _batches(task: Task, spec: JobSpec) -> Iterator[_Batch]:
    """A microbatch if steps have metrics, and of an evaluation the first batch and the last, which may be smaller."""
    size, schedule = spec.training.micro_batch_size, evaluation_schedule(task, spec.training)
    if task.metrics:
        length = dataset_length(task)
        inputs, targets = load_batch(task, [i % length for i in range(size)])
        yield _Batch(inputs=inputs, targets=targets, samples=size, evaluated=False)
    if schedule is not None:
        assert task.evaluation is not None
        for number in sorted({0, schedule.batches - 1}):
            samples = evaluated_samples(task.evaluation, number, size)
            inputs, targets = load_batch(task, samples, task.evaluation.dataset)
            yield _Batch(inputs=inputs, targets=targets, samples=len(samples), evaluated=True)


def _without_data(task: Task, spec: JobSpec, batches: Sequence[_Batch]) -> Iterator[int]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    yield from _tried(task, spec, batches, lambda index: layer_without_values(task, index, mode), mode)


def _tried(
    task: Task,
    spec: JobSpec,
    batches: Sequence[_Batch],
    build: Callable[[int], nn.Module],
    within: AbstractContextManager[object],
) -> Iterator[int]:
    """The numbers of the layers, each once all batches have gone through it. within: entered around each."""
    config, last = TrainingConfig.of(spec.training), len(task.layers) - 1
    passed = [_given(batch.inputs, within) for batch in batches]
    for index in range(last + 1):
        layer = rounded(build(index), config.parameter_dtype)
        with within, torch.no_grad():
            for at, batch in enumerate(batches):
                reduced = autocast(torch.device("cpu"), spec.training.precision.value)
                with evaluating([layer] if batch.evaluated else []), reduced:
                    passed[at] = run_layer(layer, index, passed[at])
                if index < last:
                    passed[at] = passed_on(passed[at], config.boundary_dtype)
        yield index
    for batch, outputs in zip(batches, passed, strict=True):
        _measure(task, batch, _with_values(outputs, within))


def _given(parts: Parts, within: AbstractContextManager[object]) -> Parts:
    if not isinstance(within, FakeTensorMode):
        return parts
    with within:
        return tuple(cast(Tensor, within.from_tensor(p.detach())) for p in parts)


def _with_values(parts: Parts, within: AbstractContextManager[object]) -> Parts:
    if not isinstance(within, FakeTensorMode):
        return parts
    return tuple(torch.zeros(tuple(p.shape), dtype=p.dtype) for p in parts)


def _measure(task: Task, batch: _Batch, outputs: Parts) -> None:
    if not batch.evaluated:
        task_metrics(task, outputs, batch.targets)
        return
    assert task.evaluation is not None
    with torch.no_grad():
        measured(task, task.evaluation, outputs, batch.targets, batch.samples)
