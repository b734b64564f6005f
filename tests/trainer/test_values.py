"""Errors that end a job if a rate, scheduled value or parameter becomes infinite or NaN, or an optimizer state NaN."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from bamboo_core.coordinator import worker_reports
from bamboo_core.coordinator.events import Outcome
from bamboo_trainer import loss_scale
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.task_errors import TaskError
from stage_kit import CONFIG, one_step, small_task
from training_job import Job, job_of

STEPS = 4


class Careless(torch.optim.AdamW):
    """An optimizer that in step `at` writes `number` into each parameter of shape [3], or into its state `place`."""

    def __init__(self, params: Any, *, at: int, number: float, place: str) -> None:
        super().__init__(params, lr=0.05)
        self.at, self.number, self.place = at, number, place

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.shape == (3,) and int(self.state[parameter]["step"]) == self.at + 1:
                    (parameter if self.place == "parameter" else self.state[parameter][self.place])[1] = self.number


def rated(rate: float, at: int) -> Task:
    """Return a task whose learning rate is `rate` in step `at`."""
    return small_task(
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named]),
        learning_rate=lambda step: rate if step == at else 0.05,
    )


def careless(number: float, at: int, place: str = "parameter") -> Task:
    return small_task(optimizer=lambda named: Careless([p for _, p in named], at=at, number=number, place=place))


def ended(job: Job) -> str:
    """Run a job that a worker's TaskError ends before it completes; return the error's message."""
    with pytest.raises(TaskError) as caught:
        job.run()
    assert job.finish is None, "nothing may say that the job is complete"
    return str(caught.value)


@pytest.mark.parametrize(
    ("grid", "step", "given"),
    [
        *((grid, step, math.nan) for grid in ((1, 1), (2, 1), (2, 2)) for step in (0, 1, STEPS - 1)),
        *(((2, 1), 1, given) for given in (math.inf, -math.inf, -0.05)),
    ],
)
def test_no_step_is_committed_whose_learning_rate_is_none(grid: tuple[int, int], step: int, given: float) -> None:
    job = job_of(rated(given, step), grid, STEPS)
    wrong = f"task.learning_rate({step}) returned {given}, expected a finite number that is not negative"
    assert ended(job) == wrong
    assert sorted(job.state.progress.losses) == list(range(step))


@pytest.mark.parametrize(
    ("grid", "step", "number"),
    [
        *((grid, step, math.nan) for grid in ((1, 1), (3, 1), (2, 2)) for step in (0, 1, STEPS - 1)),
        ((2, 2), 1, math.inf),
    ],
)
def test_an_optimizer_that_leaves_no_numbers_is_named_with_its_step(
    grid: tuple[int, int], step: int, number: float
) -> None:
    job = job_of(careless(number, step), grid, STEPS)
    assert ended(job) == (
        "the optimizer (Careless) left numbers in parameter 'bias' of layer 0 (Linear) that are not finite, "
        f"in step {step + 1} (rate 0.1)"
    )
    assert max(job.state.progress.losses, default=-1) <= step


@pytest.mark.parametrize("step", [1, STEPS - 1])
def test_no_step_is_committed_with_another_scheduled_value_that_is_none(step: int) -> None:
    task = small_task(schedules={"momentum": lambda version: math.nan if version == step else 0.5})
    job = job_of(task, (2, 1), STEPS)
    assert ended(job) == f"task.schedules['momentum']({step}) returned nan, expected a finite number"
    assert sorted(job.state.progress.losses) == list(range(step))


def test_after_the_last_step_what_the_optimizer_remembers_is_looked_at_too() -> None:
    job = job_of(careless(math.nan, STEPS - 1, "exp_avg"), (2, 1), STEPS)
    wrong = f"remembers NaN as 'exp_avg' of parameter 'bias' of layer 0 (Linear) after step {STEPS}"
    assert ended(job) == f"the optimizer (Careless) {wrong}"


def test_so_is_what_a_checkpoint_would_keep() -> None:
    stage = build_stage(careless(math.nan, 0, "exp_avg_sq"), 0, [(0, 3)], CONFIG)
    one_step([stage], 0)
    for keep in (stage.values.layer_states, lambda: stage.values.late_copies([2])):
        with pytest.raises(TaskError, match="remembers NaN as 'exp_avg_sq'"):
            keep()


def test_large_numbers_are_finite_although_their_norm_is_not() -> None:
    stage = build_stage(careless(3e38, 0), 0, [(0, 3)], CONFIG)
    one_step([stage], 0)
    assert stage.values.version == 1


def test_a_parameter_that_begins_with_infinite_values_may_keep_them() -> None:
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.mask = nn.Parameter(torch.tensor([0.0, -math.inf]))

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return super().forward(given) * torch.exp(self.mask.detach() * 0).nan_to_num(1.0)

    stage = build_stage(replace(small_task(), layers=(Masked,)), 0, [(0, 1)], CONFIG)
    one_step([stage], 0)
    stage.values.digest()
    assert stage.values.version == 1


def test_steps_that_are_skipped_in_fp16_stay_legal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first scale is far too large, so gradients overflow and steps are skipped; the state stays finite."""
    monkeypatch.setattr(loss_scale, "INITIAL", 2.0**32)
    monkeypatch.setattr(worker_reports, "MOST_SKIPS", 40)
    job = job_of(rated(0.05, -1), (2, 1), STEPS, precision="fp16").run()
    assert job.outcome is Outcome.COMPLETE
    assert job.state.progress.skips
