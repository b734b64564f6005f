"""Final gradients in bf16: half of what replicas receive, applied by owners and replicas alike, the same bits."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from bamboo_trainer.frames.frame import Address, Frame, FrameKind
from bamboo_trainer.frames.payloads import RefusedFrame, read
from manifest_kit import bamboojob, gpt_task, training
from memory_transport import MemoryTransport
from stage_kit import CONFIG, SPLITS, check_rounds_as_plain_pytorch, small_gpt
from training_job import Job

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
