"""A task's evaluations, metrics and decisions: calls with checked results, and a trial before a job runs.

Each batch gives a metric's sum and weight. The metric of a state is the total of the sums divided by the total of the
weights. Both totals are exactly rounded, so it does not matter which worker computed which batch.

The trial in the check of a job (`try_measurements`) reports mistakes that would end the job at its first step or first
evaluation. It runs the layers forward, without data if possible (see `inspection`). Metrics get the last layer's
outputs, or zeros of their form if they have no data; an error then counts only if it also occurs with data.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

import torch

from bamboo_core.control.protocol import MOST_METRICS
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.training_spec import TrainingSpec
from bamboo_trainer.decisions import Committed, Decision, Memory
from bamboo_trainer.frames import MOST_MEMORY, Commit, Decided
from bamboo_trainer.task import Evaluation, Parts, Sum, Task, sum_and_weight
from bamboo_trainer.tasks.inspection import Walk, first_batch, forward, look
from bamboo_trainer.tasks.mixed_precision import rounded
from bamboo_trainer.tasks.running_buffers import evaluating
from bamboo_trainer.tasks.task_errors import TaskError, in_task
from bamboo_trainer.tasks.user_code import dataset_length, load_batch, task_metrics
from bamboo_trainer.training import TrainingConfig

LOSS = "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSchedule:
    """The schedule of evaluations: after every `every_steps` steps and after the last step. batches: per evaluation."""

    every_steps: int
    batches: int
    steps: int  # of the job

    def batches_of(self, version: int) -> int:
        """Return the number of batches on which the state after `version` steps is evaluated; 0 if it is not."""
        due = version == self.steps or (version > 0 and version % self.every_steps == 0)
        return self.batches if due else 0


def evaluation_schedule(task: Task, training: TrainingSpec) -> EvaluationSchedule | None:
    """Return the schedule of evaluations; None if the job requests none. Raises TaskError if the task has no
    evaluation, its data or metrics are invalid, or `training.evaluation.metric` is unknown.
    """
    wanted = training.evaluation
    if wanted is None:
        return None
    evaluation = task.evaluation
    if evaluation is None:
        raise TaskError(
            "training.evaluation is set, but the task has no `evaluation`: no data, and no metrics "
            "(the models of the library and of transformers take it from task.config.evaluation)"
        )
    metrics = evaluation.metrics
    if not isinstance(metrics, Mapping) or not all(isinstance(k, str) and callable(v) for k, v in metrics.items()):
        raise TaskError("evaluation.metrics must be a mapping from names to functions of outputs and targets")
    if LOSS in metrics or len(metrics) >= MOST_METRICS:
        raise TaskError(f'evaluation.metrics must be fewer than {MOST_METRICS}, and none of them "{LOSS}"')
    known = (LOSS, *sorted(metrics))
    if wanted.metric not in known:
        raise TaskError(f"training.evaluation.metric is {wanted.metric!r}, expected one of {', '.join(known)}")
    length, size = dataset_length(task, evaluation.dataset), training.micro_batch_size
    most = -(-length // size)
    batches = most if wanted.batches is None else min(most, wanted.batches)
    return EvaluationSchedule(every_steps=wanted.every_steps, batches=batches, steps=training.steps)


def evaluated_samples(evaluation: Evaluation, batch: int, size: int) -> range:
    """Return the sample numbers of an evaluation's batch, in the dataset's order. size: samples per batch."""
    return range(batch * size, min((batch + 1) * size, len(evaluation.dataset)))


def measured(task: Task, evaluation: Evaluation, outputs: Parts, targets: Parts, samples: int) -> dict[str, Sum]:
    """Return (sum, weight) of a batch's loss and metrics, by name; a mean's weight is `samples`. Raises TaskError."""
    outputs = tuple(p.float() if p.is_floating_point() else p for p in outputs)
    with in_task("the loss, in an evaluation,"):
        values: dict[str, object] = {LOSS: task.loss(outputs, targets)}
    for name, metric in evaluation.metrics.items():
        with in_task(f"evaluation.metrics[{name!r}]"):
            values[name] = metric(outputs, targets)
    return {name: sum_and_weight(name, value, samples) for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """A batch to try. evaluated: it belongs to an evaluation, not to a step."""

    inputs: Parts
    targets: Parts
    samples: int
    evaluated: bool


def try_measurements(task: Task, spec: JobSpec) -> None:
    """Try the metrics of a step, and the loss and metrics of the job's evaluations. Raises TaskError on failure."""
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
    """Yield a step's microbatch if the task has metrics; the first and last evaluation batch if the job evaluates."""
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


_LARGEST: Final = 2**53  # absolute value of a whole number in a decision's memory


def next_decided(task: Task, before: Decided | None, done: Committed) -> Decided | None:
    """Call the task's decisions; return their combined result, or None if there are none. before: the last result."""
    if not task.decisions:
        return None
    memories = before.memory if before else {}
    decisions = {name: _asked(task, name, done, memories.get(name, {})) for name in sorted(task.decisions)}
    return Decided(
        learning_rate=math.prod((decision.learning_rate for decision in decisions.values()), start=1.0),
        frozen=tuple(sorted({pattern for decision in decisions.values() for pattern in decision.frozen})),
        stops=tuple(name for name, decision in decisions.items() if decision.stop),
        memory={name: dict(decision.memory) for name, decision in decisions.items()},
    )


def committed_step(step: int, commit: Commit) -> Committed:
    """Return the facts about a commit for decisions. step: the number of committed steps, including this one."""
    return Committed(
        step=step,
        loss=finite(commit.loss),
        gradient_norm=finite(commit.norm),
        metrics={name: finite(value) for name, value in commit.metrics.items()},
        evaluation={name: finite(value) for name, value in commit.evaluation.items()},
        skipped=commit.skipped,
    )


def frozen_among(names: Collection[str], decided: Decided | None) -> frozenset[str]:
    """Return which of these parameter names the decisions freeze in the next step."""
    return _matching(tuple(names), tuple(decided.frozen)) if decided else frozenset()


@lru_cache(maxsize=256)
def _matching(names: tuple[str, ...], patterns: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def _asked(task: Task, name: str, done: Committed, memory: Memory) -> Decision:
    """Call one of the task's decisions, and check its result. Raises TaskError."""
    who = f"task.decisions[{name!r}], after step {done.step},"
    with in_task(who):
        decision = task.decisions[name](done, memory)
    if not isinstance(decision, Decision):
        raise TaskError(f"{who} returned {type(decision).__name__}, expected a Decision")
    rate, frozen = decision.learning_rate, decision.frozen
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not math.isfinite(rate) or rate < 0:
        raise TaskError(f"{who} returned learning_rate={rate!r}, expected a finite number that is not negative")
    names = isinstance(frozen, Collection) and not isinstance(frozen, str)
    if not names or not all(isinstance(one, str) for one in frozen):
        raise TaskError(f'{who} returned frozen={frozen!r}, expected names such as "0.weight" in a tuple')
    if not isinstance(decision.memory, Mapping) or len(decision.memory) > MOST_MEMORY:
        raise TaskError(f"{who} returned memory={decision.memory!r}, expected at most {MOST_MEMORY} numbers by name")
    for key, value in decision.memory.items():
        number = value is None or (isinstance(value, int) and abs(value) <= _LARGEST)
        if not isinstance(key, str) or not (number or (isinstance(value, float) and math.isfinite(value))):
            raise TaskError(f"{who} returned {value!r} as memory[{key!r}], expected a finite number or None")
    return decision


def finite(number: float) -> float | None:
    """Return the number; None if it is not finite."""
    return number if math.isfinite(number) else None
