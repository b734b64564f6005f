"""A task's decisions on learning rate, frozen parameters and the end of training; the decisions in Bamboo itself."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import reference
from bamboo_trainer.decisions import Committed, Decision, Memory, frozen_for, reduce_on_plateau, stop_when
from bamboo_trainer.task import Task
from bamboo_trainer.training import TrainingConfig
from stage_kit import small_task
from training_job import Job, job_of

STEPS, LAST, MICROBATCHES = 9, 7, 4


def slowing(done: Committed, memory: Memory) -> Decision:
    """Divide the learning rate by 1 + the sum of all losses and norms so far, so that each of their bits counts."""
    seen = float(memory.get("seen") or 0.0) + (done.loss or 0.0) + (done.gradient_norm or 0.0)
    return Decision(learning_rate=1 / (1 + seen), memory={"seen": seen})


def after_seven(done: Committed, memory: Memory) -> Decision:
    return Decision(stop=done.step >= LAST)


def build(config: Mapping[str, Any]) -> Task:
    """Return a task with four decisions, or the ones named in config's `decisions`. `tied`: two biases are tied."""
    decisions = {
        "slowing": slowing,
        "plateau": reduce_on_plateau(factor=0.5, patience=1, threshold=0.2),
        "unfreeze": frozen_for(3, "0.*", "3.bias"),
        "end": after_seven,
    }
    return small_task(
        layers=(lambda: nn.Linear(2, 3), nn.Tanh, lambda: nn.Linear(3, 3), lambda: nn.Linear(3, 2)),
        tied=(("0.bias", "2.bias"),) if config.get("tied") else (),
        optimizer=lambda named: torch.optim.AdamW(named, lr=0.1),
        learning_rate=lambda step: 0.1 / (1 + step),
        decisions={name: decisions[name] for name in config.get("decisions", decisions)},
    )


def job(grid: tuple[int, int], steps: int = STEPS, **config: Any) -> Job:
    return job_of(build(config), grid, steps, maxGradientNorm=0.1).run()


def test_a_decision_ends_training_with_the_state_after_its_step() -> None:
    whole = job((1, 1))
    losses = whole.state.progress.losses
    assert (whole.end.reason, whole.end.message) == (
        "EarlyStopped",
        "the task's decision 'end' ended training; the last one is that after 7 of 9 steps",
    )
    assert len(losses) == LAST
    longer = job((1, 1), LAST, decisions=["slowing", "plateau", "unfreeze"])
    assert longer.end.reason == "Complete"
    assert (longer.bits, longer.state.progress.losses) == (whole.bits, losses), "the step after it counts for nothing"


def test_numbers_are_those_of_plain_pytorch() -> None:
    config = TrainingConfig(seed=0, precision="fp32", max_gradient_norm=0.1, microbatches=4, micro_batch_size=2)
    losses, state = reference.train(build({}), config, STEPS)
    split = job((2, 1))
    assert len(losses) == LAST
    assert list(split.state.progress.losses.values()) == pytest.approx(losses, rel=1e-5)
    for name, tensor in state.items():
        torch.testing.assert_close(split.weights[name], tensor, rtol=1e-5, atol=1e-7)


def test_what_is_frozen_keeps_its_bits_and_counts_in_no_norm() -> None:
    after = job((2, 1), 3, decisions=["unfreeze"]).weights
    config = TrainingConfig(seed=0, precision="fp32", max_gradient_norm=0.1, microbatches=4, micro_batch_size=2)
    _, before = reference.train(build({}), config, 0)
    still = {name for name, tensor in before.items() if torch.equal(after[name], tensor)}
    assert still == {"layers.0.weight", "layers.0.bias", "layers.3.bias"}


# those that come with Bamboo


def said(decide: Any, *values: float | None) -> list[Decision]:
    """Return the decisions of `decide` after steps with these losses; each call gets the memory of the previous one."""
    answers: list[Decision] = [decide(Committed(step=0), {})]
    for step, loss in enumerate(values, 1):
        answers.append(decide(Committed(step=step, loss=loss), answers[-1].memory))
    return answers[1:]


def test_a_plateau_reduces_the_rate_as_in_torch() -> None:
    losses = [3.0, 2.0, 2.0, 1.9999, 2.1, 2.2, 1.0, 1.0, 1.0, 1.0, 0.999999, 1.0]
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, min_lr=0.2)
    expected = []
    for loss in losses:
        scheduler.step(loss)
        expected.append(optimizer.param_groups[0]["lr"])
    answers = said(reduce_on_plateau(factor=0.5, patience=1, least=0.2), *losses)
    assert [answer.learning_rate for answer in answers] == expected
    assert len(set(expected)) == 4


def test_a_plateau_of_an_evaluation_counts_evaluations_only() -> None:
    decide = reduce_on_plateau("evaluation/accuracy", factor=0.5, patience=0, largest=True)
    memory: Memory = {}
    rates = []
    for step, accuracy in enumerate([None, 0.5, None, 0.6, 0.6, None], 1):
        metrics = {} if accuracy is None else {"accuracy": accuracy}
        answer = decide(Committed(step=step, loss=1.0, evaluation=metrics), memory)
        memory = answer.memory
        rates.append(answer.learning_rate)
    assert rates == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]


def test_a_limit_ends_training() -> None:
    assert [one.stop for one in said(stop_when(below=1.0), 2.0, None, 1.0, 0.5)] == [False, False, False, True]
    assert [one.stop for one in said(stop_when(above=1.0), 1.0, 1.5)] == [False, True]
    with pytest.raises(ValueError, match="expected below or above"):
        stop_when()
