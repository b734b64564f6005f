"""Trial of metrics and evaluation once before a job runs, to report at once what would end it at its first evaluation.

Layers are run forward (see `inspection.walk`). Metrics get their outputs, or, as these have no data, zeros of their
form; an error must then also occur with data before it is reported.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bamboo_core.job.spec import JobSpec
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.evaluation import evaluated_samples, evaluation_schedule, measured
from bamboo_trainer.tasks.inspection.walk import Walk, first_batch, forward, look
from bamboo_trainer.tasks.mixed_precision import rounded
from bamboo_trainer.tasks.running_buffers import evaluating
from bamboo_trainer.tasks.user_code import load_batch, task_metrics
from bamboo_trainer.training import TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """A batch to try. evaluated: it belongs to an evaluation, not to a step."""

    inputs: Parts
    targets: Parts
    samples: int
    evaluated: bool


def try_measurements(task: Task, spec: JobSpec) -> None:
    """Call each metric of a step and of the job's evaluations. Raises TaskError for one that fails."""
    batches, config, last = list(_batches(task, spec)), TrainingConfig.of(spec.training), len(task.layers) - 1

    def tried(walk: Walk, index: int, inputs: list[Parts]) -> tuple[None, list[Parts]]:
        layer, outputs = rounded(walk.layer(index), config.parameter_dtype), []
        with walk.within, torch.no_grad():
            for batch, given in zip(batches, inputs, strict=True):
                with evaluating([layer] if batch.evaluated else []):
                    outputs.append(forward(task, config, index, layer, given))
        if index == last:
            for batch, parts in zip(batches, outputs, strict=True):
                _measure(task, batch, tuple(torch.zeros(p.shape, dtype=p.dtype) for p in parts) if walk.mode else parts)
        return None, outputs

    if batches:
        look(task, [batch.inputs for batch in batches], tried)


def _batches(task: Task, spec: JobSpec) -> Iterator[_Batch]:
    """Yield a microbatch if steps have metrics, and an evaluation's first batch and (perhaps smaller) last one."""
    size, schedule = spec.training.micro_batch_size, evaluation_schedule(task, spec.training)
    if task.metrics:
        inputs, targets = first_batch(task, size)
        yield _Batch(inputs=inputs, targets=targets, samples=size, evaluated=False)
    if schedule is not None:
        assert task.evaluation is not None
        for number in sorted({0, schedule.batches - 1}):
            samples = evaluated_samples(task.evaluation, number, size)
            inputs, targets = load_batch(task, samples, task.evaluation.dataset)
            yield _Batch(inputs=inputs, targets=targets, samples=len(samples), evaluated=True)


def _measure(task: Task, batch: _Batch, outputs: Parts) -> None:
    if not batch.evaluated:
        task_metrics(task, outputs, batch.targets)
        return
    assert task.evaluation is not None
    with torch.no_grad():
        measured(task, task.evaluation, outputs, batch.targets, batch.samples)
