"""Buckets of the first stage's gradient: sent during the last backward, with the same bits as a whole backward."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bamboo_trainer.loading import load_task
from bamboo_trainer.stage import parameters
from bamboo_trainer.stage.parameters import MOST_BUCKETS, Bucket, buckets_of
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.work import Work
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.ties import settled
from manifest_kit import bamboojob, training
from queued_device import QueuedJob, Speed
from stage_kit import CONFIG, ROUNDED, at, chain, small_task
from training_job import Job

HALF = (0, 1, 2, 3), (0, 2, 4, 8)  # a pipeline's microbatches, and the bounds of all groups
TRAINING = replace(CONFIG, microbatches=8)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the bucket size to 4 bytes, so that small models have as many buckets as large ones."""
    monkeypatch.setattr(parameters, "BUCKET_BYTES", 4)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=40), st.integers(0, 1), st.integers(0, 30))
def test_buckets_are_whole_layers_that_a_backward_comes_to_one_after_the_other(
    sizes: list[int], first: int, uses: int
) -> None:
    ends = list(accumulate(sizes))
    starts = {first + i: end - size for i, (size, end) in enumerate(zip(sizes, ends, strict=True))}
    found = buckets_of(starts, ends[-1], ends[-1] + uses)
    covered = sorted(i for bucket in found for i in range(bucket.place.start, bucket.place.stop))
    assert covered == list(range(ends[-1] + uses))
    of_layers = [bucket for bucket in found if bucket.place.start < ends[-1]]
    assert [b.layer for b in of_layers] == sorted((b.layer for b in of_layers), reverse=True)
    assert all(bucket.place.start == starts[bucket.layer] for bucket in of_layers)
    assert len(of_layers) <= MOST_BUCKETS
    assert first == 0 or found == (Bucket(first, slice(0, ends[-1] + uses)),)


def test_small_gradients_are_one_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    layers, megabytes = range(6), (1 << 20) // 4
    starts = {layer: 2 * megabytes * layer for layer in layers}
    assert buckets_of(starts, 12 * megabytes, 13 * megabytes) == (Bucket(0, slice(0, 13 * megabytes)),)
    large = buckets_of({layer: 10 * start for layer, start in starts.items()}, 120 * megabytes, 121 * megabytes)
    assert [bucket.place.start // megabytes for bucket in large] == [100, 80, 60, 40, 20, 0, 120]


def ran(stage: Stage, *, bucketwise: bool, after: Callable[[Work, int], None] = lambda work, m: None) -> Work:
    """Run HALF's microbatches on a stage; return the work. after: called after each backward or its first part."""
    microbatches, bounds = HALF
    work = stage.begin(microbatches, bounds, bucketwise=bucketwise)
    for m in microbatches:
        stage.forward(work, 0, m, None)
        assert stage.backward(work, 0, m, None) == ()
        after(work, m)
    return work


def check_buckets(task: Task, config: Any) -> int:
    """Check that each bucket has its final bits once its part of the backward is done. Return the number of parts."""
    (expecting,) = chain(task, [(0, len(task.layers))], config)
    expected = dict(ran(expecting, bucketwise=False).gradients.nodes())
    (stage,) = chain(task, [(0, len(task.layers))], config)
    parts = 0

    def look(work: Work, m: int) -> None:
        nonlocal parts
        for bucket, place in enumerate(stage.values.buckets if m == HALF[0][-1] else ()):
            parts += bucket == 0 or work.parts is not None
            if bucket:
                stage.backward_rest(work, 0, m)
            got = work.gradients.nodes(bucket)
            assert [node for node, _ in got] == list(expected)
            for node, total in got:
                torch.testing.assert_close(total[place], expected[node][place], rtol=0, atol=0, equal_nan=True)

    work = ran(stage, bucketwise=True, after=look)
    assert work.parts is None
    for node, total in work.gradients.nodes():
        torch.testing.assert_close(total, expected[node], rtol=0, atol=0, equal_nan=True)
    return parts


GNMT = "translation"
MODELS: dict[str, dict[str, Any]] = {
    "test_unused_parameters": {},  # experts, and a tied matrix
    "weighted_tasks": {"checkpointed": [2]},  # losses of layers
    "running_tasks": {},
    "sharing_tasks": {"sharing": "made_before"},
    GNMT: {"size": "tiny"},  # recurrent layers
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # bf16 norms
@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16", "bf16 parameters"])
def test_gradients_have_the_bits_of_a_whole_backward(form: str) -> None:
    config = replace(ROUNDED if form == "bf16 parameters" else at(form), microbatches=8)
    # torch has no recurrent layers in fp16 on a CPU, and in bf16 only with AVX-512
    lacks = form == "fp16" or (form == "bf16" and "AVX512" not in torch.backends.cpu.get_cpu_capability())
    known = MODELS.keys() - ({GNMT} if lacks else set())
    tasks = [load_task(f"{module}:build", MODELS[module]) for module in sorted(known)]
    parts = [check_buckets(settled(task, 0), config) for task in tasks]
    assert max(parts) >= 3


def test_a_checkpoint_that_runs_a_backward_of_its_own_can_be_parted() -> None:
    """Buckets work with reentrant activation checkpoints, which torch refuses in a backward for chosen inputs."""

    class Reentrant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)
            return y

    task = small_task(layers=(lambda: nn.Linear(2, 3), Reentrant, Reentrant, lambda: nn.Linear(3, 2)))
    assert check_buckets(task, replace(TRAINING, deterministic=False)) > 2


def test_a_forward_that_was_run_in_another_way_has_a_whole_backward() -> None:
    """A forward that ran layer by layer, to be timed, has a backward that is not divided by buckets."""
    (stage,) = chain(small_task(), [(0, 3)], TRAINING)
    expected = ran(stage, bucketwise=False).gradients.nodes()
    microbatches, bounds = HALF
    work = stage.begin(microbatches, bounds, bucketwise=True)
    for m in microbatches:
        forwarding = stage.start(0, m, None)
        while not forwarding.done:
            stage.advance(forwarding)
        stage.complete(work, forwarding)
        stage.backward(work, 0, m, None)
    stage.backward_rest(work, 0, microbatches[-1])
    for (node, total), (same, other) in zip(work.gradients.nodes(0), expected, strict=True):
        assert node == same
        assert torch.equal(total, other)


def test_the_reduction_is_under_way_while_the_last_backward_is() -> None:
    """Gradients are sent during the last backward. On an emulated device, the backward and the gradients' copy to the
    host take 24 ms each.

    A single bucket can only be sent after the backward. Of four buckets only the last one is sent after it.
    """
    layers, backward = 6, 0.024
    config = {"width": 32, "blocks": layers - 2, "samples": 32}
    document = bamboojob(
        task={"entrypoint": "bamboo_trainer.models.mlp:build", "config": config},
        training=training(7, 16, 2),
        topology={"stages": 1, "pipelines": 2},
        redundancy={"mode": "None"},
    )
    size = 4 * Job(document).stage("w0", 0, [(0, layers)], TRAINING).values.gradient_size

    def step(seconds: float, most: int) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parameters, "MOST_BUCKETS", most)
            job = QueuedJob(document, Speed(forward=backward / 2, backward=backward, bulk_byte=seconds / size))
            return job.run().step_seconds(5)

    whole, parted = (step(backward, most) - step(0.0, most) for most in (1, 8))
    assert whole >= 0.95 * backward
    assert parted <= 0.5 * whole
