"""Metrics and evaluations are called once before a job runs, with what they will be called with."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bamboo_core.job.manifest import parse_manifest
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.measurements import try_measurements
from bamboo_trainer.task import Evaluation, Parts, Task
from bamboo_trainer.tasks.task_errors import TaskError
from stage_kit import small_task
from task_check_kit import manifest

BOTH = {"steps": 3, "globalBatchSize": 8, "microBatchSize": 4, "evaluation": {"everySteps": 2}}
EVERY_STEP = {"steps": 3, "globalBatchSize": 8, "microBatchSize": 4}


def tried(task: Task, training: dict[str, Any] = BOTH) -> None:
    try_measurements(task, parse_manifest(manifest(training=training)))


def right(outputs: Parts, targets: Parts) -> tuple[Tensor, int]:
    """Looks at values, and knows how the outputs are laid out."""
    assert outputs[0].shape == targets[0].shape
    return (outputs[0] > float(targets[0].mean())).sum(), outputs[0].numel()


def wrong(outputs: Parts, targets: Parts) -> Tensor:
    return outputs["logits"].sum()  # type: ignore[call-overload]


def held_out(samples: int = 6) -> TensorDataset:
    points = torch.rand(samples, 2)
    return TensorDataset((points,), (points.flip(1),))


def test_what_can_be_measured_is_and_nothing_is_said() -> None:
    evaluation = Evaluation(dataset=held_out(), metrics={"right": right})
    tried(small_task(metrics={"right": right}, evaluation=evaluation))


@pytest.mark.parametrize("metric", [wrong, lambda outputs, targets: outputs[0], lambda outputs, targets: "much"])
def test_a_metric_that_raises_or_returns_no_number_is_named(metric: Any) -> None:
    with pytest.raises(TaskError, match="'it'"):
        tried(small_task(metrics={"it": metric}), EVERY_STEP)
    with pytest.raises(TaskError, match="'it'"):
        tried(small_task(evaluation=Evaluation(dataset=held_out(), metrics={"it": metric})))


def test_an_evaluation_that_the_job_does_not_ask_for_is_not_called() -> None:
    tried(small_task(evaluation=Evaluation(dataset=held_out(), metrics={"it": wrong})), EVERY_STEP)


def test_the_last_batch_of_an_evaluation_is_tried_too() -> None:
    """Of five samples in fours it has one."""

    def several(outputs: Parts, targets: Parts) -> float:
        if len(outputs[0]) < 2:
            raise ValueError("one sample has no spread")
        return float(outputs[0].std())

    with pytest.raises(TaskError, match="one sample has no spread"):
        tried(small_task(evaluation=Evaluation(dataset=held_out(5), metrics={"spread": several})))
    tried(small_task(evaluation=Evaluation(dataset=held_out(8), metrics={"spread": several})))


def test_data_of_an_evaluation_that_the_model_cannot_take_are_named() -> None:
    points = torch.rand(4, 3)
    task = small_task(evaluation=Evaluation(dataset=TensorDataset((points,), (points,))))
    with pytest.raises(TaskError, match=r"layer 0 \(Linear\) raised"):
        tried(task)


def test_a_metric_that_made_up_outputs_do_not_suit_is_called_with_those_of_the_model() -> None:
    """Zeros, which stand for the outputs, have no logarithm of their sum."""

    def picky(outputs: Parts, targets: Parts) -> float:
        if not bool((outputs[0] != 0).any()):
            raise ValueError("the outputs are all zero")
        return 1.0

    tried(small_task(metrics={"picky": picky}), EVERY_STEP)


def test_layers_are_in_eval_mode_for_an_evaluation_only() -> None:
    class OnlyOne(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.training else torch.stack([super().forward(x)] * 2)

    def check(dimensions: int) -> Any:
        def metric(outputs: Parts, targets: Parts) -> float:
            assert outputs[0].dim() == dimensions
            return 1.0

        return metric

    task = small_task(
        layers=(lambda: nn.Linear(2, 2), lambda: OnlyOne(2, 2)),
        loss=lambda outputs, targets: outputs[0].square().mean(),
        metrics={"train": check(2)},
        evaluation=Evaluation(dataset=held_out(), metrics={"held out": check(3)}),
    )
    tried(task)
    assert task.evaluation is not None
    swapped = replace(task, metrics={"train": check(3)})
    with pytest.raises(TaskError, match="metric 'train' raised AssertionError"):
        tried(swapped)
