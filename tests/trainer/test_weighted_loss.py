"""Weighted losses, losses that layers add, and metrics, equal to those of one process on any split into stages."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reference
from bamboo_core.coordinator.events import Outcome
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.running_buffers import Capture, capturing
from bamboo_trainer.tasks.user_code import build_layer, forward_seed
from bamboo_trainer.training import TrainingConfig
from stage_kit import chain, state_of
from training_job import job_of
from weighted_tasks import accuracy, build, largest, loss_sum, one_step, valid

STEPS, MICROBATCHES = 4, 4


CONFIG = TrainingConfig(seed=0, precision="fp32", max_gradient_norm=0.5, microbatches=MICROBATCHES, micro_batch_size=2)


SPLITS = ([(0, 4)], [(0, 1), (1, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)])


def plainly(task: Task, config: TrainingConfig, steps: int, *, weighted: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Train in plain PyTorch; return losses and state. weighted: take means over valid tokens, not microbatches."""
    layers = nn.ModuleList(build_layer(task, config.seed, i) for i in range(len(task.layers)))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        batches = [task.dataset.batch(config.samples(step, m, task.dataset)) for m in range(config.microbatches)]
        counts = [float(valid(targets)) for _, targets in batches]
        total = torch.zeros(())
        for m, ((tokens,), targets) in enumerate(batches):
            parts: Any = tokens
            share = counts[m] / sum(counts) if weighted else 1 / config.microbatches
            for i, layer in enumerate(layers):
                torch.manual_seed(forward_seed(config.seed, step, m, i))
                capture = Capture()
                with capturing(capture):
                    parts = layer(parts)
                total = total + share * sum(value for _, value in capture.losses)
            main = loss_sum((parts,), targets)
            total = total + (main / sum(counts) if weighted else share * main / (counts[m] + 1))
        total.backward()
        torch.nn.utils.clip_grad_norm_(layers.parameters(), config.max_gradient_norm)
        optimizer.step()
        losses.append(float(total.detach()))
    return losses, {f"layers.{name}": p.detach() for name, p in layers.state_dict().items()}


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("checkpointed", [(), (1, 3)])
def test_a_chain_trains_as_one_process_that_divides_by_the_global_count(weighted: bool, checkpointed: Any) -> None:
    task = build({"weighted": weighted, "checkpointed": checkpointed})
    losses, expected = plainly(task, CONFIG, STEPS, weighted=weighted)
    told, trained = reference.train(task, CONFIG, STEPS)
    assert told == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(trained, expected, rtol=1e-4, atol=1e-5)
    for split in SPLITS:
        stages = chain(task, split, CONFIG)
        results = [one_step(stages, step, CONFIG) for step in range(STEPS)]
        assert [result.loss for result in results] == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(state_of(stages), expected, rtol=1e-4, atol=1e-5)
        assert list(results[0].metrics) == ["accuracy", "balance", "constant", "decay", "largest", "last"]
    other = plainly(task, CONFIG, STEPS, weighted=not weighted)[0]
    assert other != pytest.approx(losses, rel=1e-3)


def test_metrics_are_over_the_whole_batch() -> None:
    task, stages = build({}), chain(build({}), SPLITS[2], CONFIG)
    outputs, targets = [], []
    for m in range(MICROBATCHES):
        (tokens,), wanted = task.dataset.batch(CONFIG.samples(0, m, task.dataset))
        parts: Any = tokens
        for i, stage in enumerate(stages):
            torch.manual_seed(forward_seed(0, 0, m, i))
            parts = stage.values.layers[i](parts)
        outputs.append(parts)
        targets.append(wanted[0])
    metrics = one_step(stages, 0, CONFIG).metrics
    right = accuracy((torch.cat(outputs),), (torch.cat(targets),))
    assert metrics["accuracy"] == pytest.approx(float(right.total) / float(right.weight))
    assert metrics["largest"] == pytest.approx(sum(largest((one.detach(),), ()) for one in outputs) / MICROBATCHES)
    assert 0 < metrics["accuracy"] < 1


@pytest.mark.parametrize(("policy", "outcome"), [("Fail", Outcome.FAILED), ("Skip", Outcome.COMPLETE)])
def test_a_step_without_any_weight_has_no_finite_loss(policy: str, outcome: Outcome) -> None:
    job = job_of(build({"checkpointed": [2], "none": True}), (2, 2), STEPS, nonFinite=policy).run()
    assert job.outcome is outcome
    if outcome is Outcome.FAILED:
        assert job.end.reason == "LossNotFinite"
    else:
        assert job.state.progress.skipped_steps == STEPS
        assert job.state.progress.losses == {}
        assert job.state.progress.metrics["accuracy"] is None
