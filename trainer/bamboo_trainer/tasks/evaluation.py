"""A task's evaluation, checked: the samples of each batch, and the metrics measured on them.

A metric is a sum and its weight, batch by batch; a state's value is the sum of all sums over that of all weights,
exactly rounded, so it depends neither on the grid nor on which worker computed which batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bamboo_core.control.protocol import MOST_METRICS
from bamboo_core.job.training_spec import TrainingSpec
from bamboo_trainer.task import Evaluation, Parts, Task
from bamboo_trainer.tasks.losses import Sum, sum_and_weight
from bamboo_trainer.tasks.task_errors import TaskError, in_task
from bamboo_trainer.tasks.user_code import dataset_length

LOSS = "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSchedule:
    """The times of evaluations, and their batches: every `every_steps` steps, and after the last one."""

    every_steps: int
    batches: int
    steps: int  # of the job

    def batches_of(self, version: int) -> int:
        """Return the number of batches on which the state after `version` steps is evaluated; 0 if it is not."""
        due = version == self.steps or (version > 0 and version % self.every_steps == 0)
        return self.batches if due else 0


def evaluation_schedule(task: Task, training: TrainingSpec) -> EvaluationSchedule | None:
    """Return the schedule of evaluations; None if the job requests none. Raises TaskError if the task lacks what it
    needs.
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
    """Return the samples of a batch: in the order of the dataset; the last batch may have fewer."""
    return range(batch * size, min((batch + 1) * size, len(evaluation.dataset)))


def measured(task: Task, evaluation: Evaluation, outputs: Parts, targets: Parts, samples: int) -> dict[str, Sum]:
    """Return the loss and each metric of a batch. A mean counts once for each sample. Raises TaskError."""
    outputs = tuple(p.float() if p.is_floating_point() else p for p in outputs)
    with in_task("the loss, in an evaluation,"):
        found: dict[str, object] = {LOSS: task.loss(outputs, targets)}
    for name, metric in evaluation.metrics.items():
        with in_task(f"evaluation.metrics[{name!r}]"):
            found[name] = metric(outputs, targets)
    return {name: sum_and_weight(name, value, samples) for name, value in found.items()}
