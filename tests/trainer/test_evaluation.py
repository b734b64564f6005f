"""Evaluation, metrics and decisions of a task: the trial before a job, and the message for each mistake."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bamboo_core.job.manifest import parse_manifest
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.decisions import Committed, Decision
from bamboo_trainer.frames import Commit, Decided
from bamboo_trainer.task import Evaluation, Parts, Task
from bamboo_trainer.tasks.evaluation import committed_step, frozen_among, next_decided, try_measurements
from bamboo_trainer.tasks.task_errors import TaskError
from stage_kit import small_task
from task_check_kit import manifest

BOTH = {"steps": 3, "globalBatchSize": 8, "microBatchSize": 4, "evaluation": {"everySteps": 2}}
EVERY_STEP = {"steps": 3, "globalBatchSize": 8, "microBatchSize": 4}


def tried(task: Task, training: dict[str, Any] = BOTH) -> None:
    try_measurements(task, parse_manifest(manifest(training=training)))


def right(outputs: Parts, targets: Parts) -> tuple[Tensor, int]:
    """Return the number of output values above the targets' mean, and of all: a metric that reads values."""
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
    """The trial also runs an evaluation's last batch, which here has one of five samples."""

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
    """A metric that refuses the trial's first outputs, all zeros, is called with outputs of the model."""

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


def test_what_several_say_adds_up() -> None:
    task = small_task(
        decisions={
            "slow": lambda done, memory: Decision(learning_rate=0.5, memory={"steps": done.step}),
            "slower": lambda done, memory: Decision(learning_rate=0.25, frozen=("0.*",)),
            "end": lambda done, memory: Decision(frozen=["2.bias", "0.*"], stop=done.step == 1),
        }
    )
    said = next_decided(task, None, Committed(step=0))
    assert said is not None
    assert (said.learning_rate, said.frozen, said.stops) == (0.125, ("0.*", "2.bias"), ())
    said = next_decided(task, said, Committed(step=1))
    assert said is not None
    assert (said.stops, said.memory["slow"]) == (("end",), {"steps": 1})
    assert frozen_among(["0.weight", "0.bias", "2.weight", "2.bias"], said) == {"0.weight", "0.bias", "2.bias"}


def test_each_is_given_its_own_memory() -> None:
    seen: list[Any] = []
    task = small_task(decisions={"it": lambda done, memory: seen.append(dict(memory)) or Decision(memory={"n": 1})})
    next_decided(task, Decided(memory={"it": {"n": 7}, "gone": {"n": 8}}), Committed(step=1))
    next_decided(task, Decided(memory={"other": {"n": 7}}), Committed(step=1))
    assert seen == [{"n": 7}, {}]


def test_a_task_without_any_says_nothing() -> None:
    assert next_decided(small_task(), None, Committed(step=0)) is None
    assert frozen_among(["0.weight"], None) == frozenset()


def test_what_is_not_finite_is_no_number() -> None:
    commit = Commit(norm=math.inf, loss=math.nan, microbatches=1, generation=0, epoch=0, metrics={"m": math.nan})
    done = committed_step(3, commit)
    assert (done.step, done.loss, done.gradient_norm, done.metrics) == (3, None, None, {"m": None})


def broken(done: Committed, memory: Any) -> Decision:
    raise ZeroDivisionError("no")


@pytest.mark.parametrize(
    ("decide", "message"),
    [
        (broken, r"task.decisions\['it'\], after step 2, raised ZeroDivisionError: no \(.*test_evaluation.py line \d+"),
        (lambda done, memory: None, "returned NoneType, expected a Decision"),
        (lambda done, memory: Decision(learning_rate=math.nan), "learning_rate=nan, expected a finite number"),
        (lambda done, memory: Decision(learning_rate=-1), "learning_rate=-1, expected a finite number"),
        (lambda done, memory: Decision(learning_rate=True), "learning_rate=True, expected a finite number"),
        (lambda done, memory: Decision(frozen="0.*"), r"frozen='0.\*', expected names such as"),
        (lambda done, memory: Decision(frozen=None), "frozen=None, expected names such as"),  # type: ignore[arg-type]
        (lambda done, memory: Decision(frozen=map(str, "0")), "expected names such as"),  # type: ignore[arg-type]
        (lambda done, memory: Decision(memory={"x": math.inf}), r"returned inf as memory\['x'\], expected a finite"),
        (lambda done, memory: Decision(memory={"x": "y"}), r"returned 'y' as memory\['x'\]"),  # type: ignore[dict-item]
        (lambda done, memory: Decision(memory={str(n): n for n in range(65)}), "expected at most 64 numbers by name"),
    ],
)
def test_a_wrong_answer_is_told_by_the_decisions_name(decide: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        next_decided(small_task(decisions={"it": decide}), None, Committed(step=2))
