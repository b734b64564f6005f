"""Parameters in bf16: half the memory of state, gradients summed in fp32, the same bits on any grid."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bamboo.control.digests import add_digests
from bamboo.job.manifest import parse_manifest
from bamboo.planning.plan import Cell
from bamboo_trainer import reference
from bamboo_trainer.checkpoint.layer_file import decode, encode
from bamboo_trainer.memory.estimate import measure
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.task import Task
from manifest_kit import bamboojob, training
from running_tasks import build as running_task
from stage_kit import ROUNDED, SPLITS, begin, chain, microbatch, one_step, small_gpt, small_task, state_of
from training_job import Fault, Job

UNCLIPPED = replace(ROUNDED, max_gradient_norm=None)


class Frozen(nn.Linear):
    """Its bias is not trained."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.bias.requires_grad_(False)


def build(config: Mapping[str, Any]) -> Task:
    return small_task(
        layers=(lambda: nn.Linear(2, 3), Frozen, nn.Tanh, lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.05, fused=config.get("fused", False)),
        learning_rate=lambda step: 0.05 / (step + 1),
    )


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_it_trains_like_plain_pytorch_with_rounded_parameters(tmp_path, stages: int, tied: bool) -> None:
    task = small_gpt(tmp_path, dropout=0.1, tieEmbeddings=tied, learningRate=1e-2, warmupSteps=2, steps=6)
    losses, state = reference.train(task, UNCLIPPED, 6)
    parts = chain(task, SPLITS[stages], UNCLIPPED)
    told = [one_step(parts, k, UNCLIPPED) for k in range(6)]
    trained = state_of(parts)
    assert {str(t.dtype) for t in trained.values()} == {"torch.bfloat16", "torch.float32"}, "norms stay in fp32"
    if tied:
        assert told == pytest.approx(losses, rel=2e-2)
    else:
        assert told == losses
        torch.testing.assert_close(trained, state, rtol=0, atol=0)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_job_has_the_same_bits_on_any_grid_and_after_losses(fused: bool) -> None:
    def manifest(stages: int, pipelines: int) -> dict[str, Any]:
        return bamboojob(
            task={"entrypoint": "test_parameter_precision:build", "config": {"fused": fused}},
            training=training(
                4, 8, 2, precision="bf16", parameterPrecision="bf16", maxGradientNorm=1.0, ema={"decay": 0.99}
            ),
            topology={"stages": stages, "pipelines": pipelines},
            redundancy={"mode": "EagerForward"},
        )

    faults = [
        Fault("Backward", Cell(0, 1), 2, 0),
        Fault("OptimizerStep", Cell(0, 1), 2),
        Fault("Forward", Cell(1, 0), 3, 2),
    ]
    jobs = [Job(manifest(*grid)).run() for grid in ((1, 1), (4, 1), (2, 2))]
    jobs += [Job(manifest(2, 2), (fault,)).run() for fault in faults]
    assert not any(job.faults for job in jobs)
    assert len({add_digests(job.digests) for job in jobs}) == 1
    assert all(job.finish is not None and job.finish.reason == "Complete" for job in jobs)


def test_gradients_are_summed_in_fp32_and_updates_are_rounded() -> None:
    stage = Stage(build({}), 0, [(0, 4)], UNCLIPPED)
    work = begin(stage, 0, 1, 2)
    for index in range(3):
        microbatch([stage], [work], 0, index)
    total = work.gradients.total()
    assert total.dtype == torch.float32
    each = []
    for index in range(3):
        one = stage.begin([index], [index, index + 1])
        microbatch([stage], [one], 0, index)
        each.append(one.gradients.total().clone())
    marks = [slot.mark for slot in stage._parameters.slots]
    for sums in (total, *each):
        sums[marks] = 0
    assert torch.equal(total, each[0] + each[1] + each[2])
    assert not torch.equal(total, total.bfloat16().float()), "the sum has more digits than bf16"
    assert all(torch.equal(one, one.bfloat16().float()) for one in each), "a microbatch's gradient is that of bf16"


def test_the_state_is_half_as_large_and_moves_to_other_splits_in_checkpoints() -> None:
    task = build({})
    whole = Stage(task, 0, [(0, 4)], replace(UNCLIPPED, precision="fp32", parameter_precision="fp32"))
    stages = chain(task, [(0, 2), (2, 4)], UNCLIPPED)
    for step in range(2):
        one_step(stages, step, UNCLIPPED)
    counts = 4 * sum(len(stage._parameters.slots) for stage in stages)  # of steps, one number for each parameter
    halves = [stage.state_bytes() for stage in stages]
    assert 2 * sum(held for held, _ in halves) == whole.state_bytes()[0]
    assert 2 * (sum(state for _, state in halves) - counts) == whole.state_bytes()[1] - counts
    files = {i: b"".join(encode(state)) for stage in stages for i, state in stage.layer_states().items()}
    assert {t.dtype for t in decode(files[1]).tensors.values() if t.dim()} == {torch.bfloat16}
    other = Stage(task, 0, [(0, 4)], UNCLIPPED)
    other.restore_layers({i: decode(data) for i, data in files.items()})
    assert other.digest() == add_digests(stage.share_of_digest() for stage in stages)
    assert one_step([other], 2, UNCLIPPED) == one_step(stages, 2, UNCLIPPED)
    with pytest.raises(ValueError, match=r"is torch\.bfloat16 .*expected torch\.float32"):
        whole.restore(*other.snapshot())


def test_averages_are_kept_in_fp32() -> None:
    """In bf16 a thousandth of a difference would be rounded away."""
    config = replace(UNCLIPPED, ema=0.999)
    stage = Stage(build({}), 0, [(0, 4)], config)
    before = averages(stage)
    for step in range(3):
        one_step([stage], step, config)
    after = averages(stage)
    assert {t.dtype for t in after.values()} == {torch.float32}
    assert all(not torch.equal(after[name], before[name]) for name in after)


def averages(stage: Stage) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in stage._optimizer_state.named() if n.endswith("weights_ema")}


def test_norms_stay_in_fp32_and_take_whatever_comes() -> None:
    stages = chain(running_task({}), [(0, 2), (2, 4)], UNCLIPPED)
    for step in range(2):
        one_step(stages, step, UNCLIPPED)
    state = state_of(stages)
    assert state["layers.0.even.running_mean"].dtype == torch.float32
    assert (state["layers.0.even.weight"].dtype, state["layers.0.conv.weight"].dtype) == (torch.float32, torch.bfloat16)


def test_the_estimate_counts_what_a_stage_holds() -> None:
    document = bamboojob(
        task={"entrypoint": "m:build"},
        training=training(3, 8, 2, precision="bf16", parameterPrecision="bf16"),
        topology={"stages": 1},
    )
    task = build({})
    sizes = measure(task, parse_manifest(document))
    stage = Stage(task, 0, [(0, 4)], UNCLIPPED)
    one_step([stage], 0, UNCLIPPED)
    assert sum(size.held for size in sizes) == sum(tensor.nbytes for _, tensor in stage._parameters.named())
    assert sum(size.remembered for size in sizes) == stage.state_bytes()[1]
    assert sum(size.gradients for size in sizes) == 4 * sum(p.numel() for p in stage._parameters.trained())
