"""Steps with a loss or gradient that is not finite: all workers skip them, or the job ends."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from bamboo_trainer.task import Parts, Task
from bamboo_trainer.training import TrainingConfig
from stage_kit import plain_model, plain_state, plain_steps, small_task
from training_job import job_of

STEPS = 6
BAD = 5  # a sample, that comes in some steps only


class Poisoned(torch.autograd.Function):
    """The identity function, with infinite gradients for the samples that `bad` marks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bad: Tensor) -> Tensor:
        ctx.save_for_backward(bad)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (bad,) = ctx.saved_tensors
        return torch.where(bad[:, None], torch.full_like(gradient, math.inf), gradient), None


def loss(kind: str, outputs: Parts, targets: Parts) -> Tensor:
    bad = torch.isclose(targets[0][:, 0], torch.tensor((2 * BAD + 1) / 24))
    given = Poisoned.apply(outputs[0], bad) if kind == "gradient" else outputs[0]
    mean = (given - targets[0]).square().mean()
    return mean + (math.nan if kind == "loss" and bool(bad.any()) else 0.0)


def build(config: Mapping[str, Any]) -> Task:
    return small_task(
        loss=lambda outputs, targets: loss(config["kind"], outputs, targets),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.05),
        learning_rate=lambda step: 0.05 / (step + 1),
    )


def plainly(kind: str) -> tuple[list[int], dict[str, Tensor]]:
    """Train in plain PyTorch; skip steps with a non-finite loss or gradient. Return skipped steps and final state."""
    config = TrainingConfig(seed=0, precision="fp32", max_gradient_norm=1.0, microbatches=4, micro_batch_size=2)
    task, skipped = build({"kind": kind}), []
    model = plain_model(task, 0)
    optimizer = task.optimizer(model.named_parameters())
    for step, total in plain_steps(task, model, optimizer, config, STEPS):
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not (math.isfinite(total) and math.isfinite(norm)):
            skipped.append(step)
            optimizer.zero_grad()  # without gradients it changes nothing
    return skipped, plain_state(model)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_skipped_steps_are_as_in_plain_pytorch(kind: str) -> None:
    skipped, expected = plainly(kind)
    assert 1 <= len(skipped) < STEPS - 1, "the test has to have both"
    job = job_of(build({"kind": kind}), (2, 2), STEPS, nonFinite="Skip").run()
    assert list(job.state.progress.skips) == skipped
    assert job.state.progress.skipped_steps == len(skipped)
    assert [k for k in range(STEPS) if k not in job.state.progress.losses] == (skipped if kind == "loss" else [])
    assert sum(emit.reason == "StepSkipped" for emit in job.emitted) == len(skipped)
    torch.testing.assert_close(job.weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "reason"), [("loss", "LossNotFinite"), ("gradient", "GradientNotFinite")])
def test_by_default_the_job_ends(kind: str, reason: str) -> None:
    job = job_of(build({"kind": kind}), (2, 1), STEPS).run()
    assert job.end.reason == reason
    step = plainly(kind)[0][0]
    assert job.end.message == f"the {kind} of step {step + 1} is not a finite number"
