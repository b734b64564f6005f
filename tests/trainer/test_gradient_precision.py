"""Final gradients in bf16: half of what replicas receive, applied by owners and replicas alike, the same bits."""

import signal
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bamboo_core.coordinator.events import Outcome
from bamboo_core.planning.plan import Cell
from bamboo_trainer.frames.frame import Address, Frame, FrameKind
from bamboo_trainer.frames.payloads import RefusedFrame, read
from manifest_kit import bamboojob, gpt_task, training
from memory_transport import MemoryTransport
from processes import run_with_faults
from stage_kit import CONFIG, SPLITS, check_rounds_as_plain_pytorch, small_gpt
from training_job import Fault, Job, check_same_bits, run_each

HALVED = replace(CONFIG, gradient_precision="bf16", max_gradient_norm=None)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_it_trains_like_plain_pytorch_that_rounds_before_the_optimizer(tmp_path, stages: int) -> None:
    task = small_gpt(tmp_path, dropout=0.1, learningRate=1e-2, warmupSteps=2, steps=4)
    check_rounds_as_plain_pytorch(task, SPLITS[stages], HALVED, replace(HALVED, gradient_precision="fp32"))


def manifest(stages: int, pipelines: int, *, gradients: str = "bf16", tied: bool = True, **changes: Any) -> Any:
    return bamboojob(
        task=gpt_task(dModel=16, context=8, tieEmbeddings=tied),
        training=training(4, 8, 2, gradientPrecision=gradients, maxGradientNorm=1.0, **changes),
        topology={"stages": stages, "pipelines": pipelines},
        redundancy={"mode": "EagerForward"},
    )


def test_a_job_has_the_same_bits_on_any_grid_and_after_losses() -> None:
    faults = [
        Fault("Backward", Cell(0, 1), 2, 0),
        Fault("ReduceGradients", Cell(0, 1), 2),
        Fault("GatherGradients", Cell(1, 0), 1, after=True),
        Fault("SumTied", Cell(1, 1), 2, after=True),
        Fault("SyncReplicas", Cell(0, 0), 2),
        Fault("OptimizerStep", Cell(0, 1), 2),
        Fault("ReplicaUpdate", Cell(0, 0), 2),
    ]
    grids = ((1, 1), (4, 1), (2, 2), (1, 3), (2, 4))
    check_same_bits(*run_each(manifest, *grids, *((2, 2, fault) for fault in faults)))


@pytest.fixture(scope="module")
def calm() -> Job:
    return Job(manifest(2, 2)).run()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "place",
    [
        ("SyncReplicas", 0, 0, 2, 0),
        *(
            pytest.param(place, marks=pytest.mark.slow)
            for place in [
                ("Forward", 1, 1, 2, 3),
                ("Backward", 0, 1, 2, 1),
                ("ReduceGradients", 0, 1, 2, 0),
                ("GatherGradients", 1, 0, 1, 0),
                ("SumTied", 1, 1, 2, 0),
                ("SyncReplicas", 1, 1, 2, 0),
                ("ReplicaUpdate", 0, 0, 2, 0),
                ("OptimizerStep", 0, 1, 2, 0),
            ]
        ),
    ],
    ids=lambda place: f"{place[0]}-pipeline{place[1]}-stage{place[2]}",
)
def test_a_process_that_is_killed_leaves_the_bits(
    place: tuple[str, int, int, int, int], calm: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a job without processes. Who is killed at SyncReplicas has rounded, and nobody has what it rounded."""
    job = run_with_faults(manifest(2, 2), tmp_path, monkeypatch, (*place, signal.SIGKILL))
    assert job.outcome is Outcome.COMPLETE, job.emitted
    assert job.state.progress.losses == calm.state.progress.losses
    assert dict(job.state.ending.finished) == dict(calm.state.ending.finished)
    assert job.state.membership.preemptions == 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_goes_with_any_precision(precision: str) -> None:
    check_same_bits(*run_each(partial(manifest, precision=precision), (1, 1), (2, 2)))


def test_replicas_and_finished_sums_take_half_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Counter[tuple[str, FrameKind]]()
    send = MemoryTransport.send
    for gradients in ("fp32", "bf16"):

        def counting(end: MemoryTransport, peer: str, frame: Frame, gradients: str = gradients) -> None:
            if frame.address.step == 2:  # when everybody is in step
                sent[gradients, frame.address.kind] += sum(t.nbytes for t in frame.tensors)
            send(end, peer, frame)

        monkeypatch.setattr(MemoryTransport, "send", counting)
        Job(manifest(2, 2, gradients=gradients)).run()
    for kind in (FrameKind.SYNC, FrameKind.RESULT, FrameKind.TIED):
        assert 2 * sent["bf16", kind] == sent["fp32", kind] > 0
    for kind in (FrameKind.CONTRIBUTION, FrameKind.ACTIVATION, FrameKind.GRADIENT):
        assert sent["bf16", kind] == sent["fp32", kind] > 0


def test_only_what_is_final_may_be_rounded() -> None:
    def frame(kind: FrameKind, payload: Any) -> Frame:
        return Frame(address=Address(kind, 0, 1, 3), epoch=1, tensors=(torch.zeros(3).bfloat16(),), payload=payload)

    read(frame(FrameKind.SYNC, []))
    with pytest.raises(RefusedFrame, match=r"a gradient of torch\.bfloat16"):
        read(frame(FrameKind.CONTRIBUTION, {"microbatches": {}}))
    with pytest.raises(RefusedFrame, match=r"a gradient of torch\.float16"):
        read(Frame(address=Address(FrameKind.SYNC, 0, 1, 3), epoch=1, tensors=(torch.zeros(3).half(),), payload=[]))
