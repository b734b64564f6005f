"""fp16 loss scales, equal to torch.amp.GradScaler's, and the end of a job whose gradients overflow at every scale."""

import functools
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bamboo_core.control.protocol import MOST_METRICS
from bamboo_core.coordinator.events import Outcome
from bamboo_core.coordinator.worker_reports import MOST_SKIPS
from bamboo_trainer import loss_scale
from bamboo_trainer.loss_scale import LARGEST, LossScale
from bamboo_trainer.task import Parts, Task, Weighted, add_loss
from bamboo_trainer.training import TrainingConfig
from manifest_kit import bamboojob, training
from stage_kit import plain_model, plain_state, small_task
from training_job import Job

STEPS = 10
INITIAL, INTERVAL = 2.0**18, 3


@pytest.fixture(autouse=True)
def changing_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set an initial scale and a growth interval that let the loss scale fall and grow within a few steps."""
    monkeypatch.setattr(loss_scale, "INITIAL", INITIAL)
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", INTERVAL)


@pytest.mark.parametrize("scale", [1.0, 2.0**16, LARGEST / 2])
def test_the_rule_is_that_of_gradscaler(scale: float) -> None:
    drawn = random.Random(int(math.log2(scale)))
    theirs, tracker = torch.tensor(scale), torch.tensor(0, dtype=torch.int32)
    ours = LossScale(scale)
    for _ in range(300):
        finite = drawn.random() < 0.85
        torch._amp_update_scale_(theirs, tracker, torch.tensor(0.0 if finite else 1.0), 2.0, 0.5, INTERVAL)
        ours = ours.after(finite=finite)
        assert (ours.scale, ours.good) == (float(theirs), int(tracker))


class Balanced(nn.Linear):
    """A layer that adds its own loss."""

    def forward(self, given: Tensor) -> Tensor:
        out = super().forward(given)
        add_loss(out.float().square().mean() * 0.01, "balance")
        return out


def loss(config: Mapping[str, Any], outputs: Parts, targets: Parts) -> Tensor | Weighted:
    """Return a loss whose gradients overflow in fp16 at the first scales: a mean, or Weighted if the config says so."""
    far = (outputs[0] - targets[0]).square() * 30.0
    return Weighted(far.mean() * 2, 2) if config.get("weighted") else far.mean()


def build(config: Mapping[str, Any]) -> Task:
    first = Balanced if config.get("balanced") else nn.Linear
    return small_task(
        layers=(lambda: first(2, 3), nn.Tanh, lambda: nn.Linear(3, 3), lambda: nn.Linear(3, 2)),
        loss=functools.partial(loss, config),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.05),
        learning_rate=lambda step: 0.05 / (step + 1),
    )


def manifest(
    stages: int, pipelines: int, task: Mapping[str, Any] | None = None, steps: int = STEPS, **more: Any
) -> dict[str, Any]:
    return bamboojob(
        task={"entrypoint": "test_loss_scale:build", "config": dict(task or {})},
        training=training(steps, 4, 2, precision="fp16", **more),
        topology={"stages": stages, "pipelines": pipelines},
        redundancy={"mode": "Replicas"},
    )


def plainly(task: Task) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train in plain PyTorch with GradScaler. Return losses and scales by step, and the final state by name."""
    config = TrainingConfig.of(Job(manifest(1, 1)).spec.training)
    model = plain_model(task, config.seed)
    optimizer = task.optimizer(list(model.named_parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL, growth_interval=INTERVAL)
    losses, scales = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        total = 0.0
        for m in range(config.microbatches):
            (x,), targets = task.dataset.batch(config.samples(step, m, task.dataset))
            with torch.autocast("cpu", torch.float16):
                out = model(x)
            one = task.loss((out.float(),), targets) / config.microbatches
            scaler.scale(one).backward()
            total += float(one.detach())
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate(step)
        scaler.step(optimizer)
        scaler.update()
        losses.append(total)
    return losses, scales, plain_state(model)


class Watched(Job):
    """A job that records the loss scale of each step."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self.scales: dict[int, float] = {}
        super().__init__(*given, **more)

    def _coordinate(self, event: Any) -> None:
        super()._coordinate(event)
        if "loss_scale" in self.state.progress.metrics:
            self.scales[self.state.step - 1] = self.state.progress.metrics["loss_scale"]


def test_losses_scales_and_weights_are_those_of_plain_pytorch_with_gradscaler() -> None:
    losses, scales, expected = plainly(build({}))
    assert len(set(scales)) > 3, "the test has to have scales that fall"
    assert any(after > before for before, after in pairwise(scales)), "and that grow"
    job = Watched(manifest(4, 2)).run()
    assert [job.scales[step] for step in range(STEPS)] == scales
    assert [job.state.progress.losses[step] for step in range(STEPS)] == pytest.approx(losses, rel=1e-6)
    skipped = [k for k in range(STEPS - 1) if scales[k + 1] < scales[k]]
    assert [k for k in job.state.progress.skips if k < STEPS - 1] == skipped
    torch.testing.assert_close(job.weights, expected, rtol=1e-6, atol=1e-7)


def test_a_sum_needs_the_scales_of_its_mean() -> None:
    """A Weighted sum gets the scales of the mean loss; else its gradients could overflow in too many steps in a row."""
    mean, total = (Watched(manifest(2, 1, {"weighted": kind})).run() for kind in (False, True))
    assert total.scales == mean.scales
    torch.testing.assert_close(total.weights, mean.weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scale", [3.0, 0.0, -1.0, math.nan, LARGEST * 2])
def test_a_scale_that_is_no_power_of_two_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="a power of two, got"):
        LossScale(scale)


def times(factor: float) -> Task:
    """Return a task whose loss is the mean output times a factor."""
    return replace(build({}), loss=lambda outputs, targets: outputs[0].mean() * factor)


def test_gradients_that_overflow_at_every_scale_end_the_job_with_a_clear_reason() -> None:
    job = Job(manifest(2, 1, steps=MOST_SKIPS + 2), task=times(1e30)).run()
    assert job.end.reason == "TooManySkippedSteps"
    assert job.end.message == (
        "the gradient of step 11 is not a finite number with losses scaled by 256; more than 10 steps in a row had to "
        "be skipped"
    )
    told = [emit for emit in job.emitted if emit.reason == "StepSkipped"]
    assert len(told) == MOST_SKIPS + 1
    assert not any(emit.warning for emit in told), "an overflow is what the scale is for"


def test_a_task_may_have_all_metrics_that_there_can_be() -> None:
    metrics = {f"m{i}": lambda outputs, targets: 1.0 for i in range(MOST_METRICS)}
    job = Job(manifest(2, 1), task=replace(build({}), metrics=metrics)).run()
    assert job.outcome is Outcome.COMPLETE
    assert len(job.state.progress.metrics) == MOST_METRICS
