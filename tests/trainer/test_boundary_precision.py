"""Boundary tensors in bf16: half the bytes between stages, as estimated; only tensors with a gradient are rounded."""

from typing import Any

import pytest
import torch

from bamboo_trainer.frames import Frame, FrameKind
from bamboo_trainer.loading import load_task
from bamboo_trainer.memory.estimate import measure
from bamboo_trainer.tasks.mixed_precision import passed_on
from manifest_kit import bamboojob, gpt_task, training
from memory_transport import MemoryTransport
from training_job import Job


def manifest(boundary: str) -> dict[str, Any]:
    return bamboojob(
        task=gpt_task(dModel=16, context=8),
        training=training(4, 8, 2, precision="bf16", boundaryPrecision=boundary, maxGradientNorm=1.0),
        topology={"stages": 4},
    )


def test_half_as_much_is_sent_between_stages_and_foretold(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, foretold = dict[tuple[str, FrameKind], int](), dict[str, list[int]]()
    send = MemoryTransport.send
    for boundary in ("fp32", "bf16"):

        def counting(end: MemoryTransport, peer: str, frame: Frame, boundary: str = boundary) -> None:
            kind = frame.address.kind
            if kind in (FrameKind.ACTIVATION, FrameKind.GRADIENT):
                sent[boundary, kind] = sent.get((boundary, kind), 0) + sum(t.nbytes for t in frame.tensors)
            send(end, peer, frame)

        monkeypatch.setattr(MemoryTransport, "send", counting)
        job = Job(manifest(boundary)).run()
        sizes = measure(load_task(job.spec.task.entrypoint, job.spec.task.config), job.spec)
        foretold[boundary] = [size.bytes.boundary for size in sizes[:-1]]
    for kind in (FrameKind.ACTIVATION, FrameKind.GRADIENT):
        assert 2 * sent["bf16", kind] == sent["fp32", kind] > 0
    assert [2 * size for size in foretold["bf16"]] == foretold["fp32"]


def test_what_has_no_gradient_is_not_rounded() -> None:
    mask, hidden = torch.full((2,), torch.finfo(torch.float32).min), torch.ones(2, requires_grad=True)
    kept, rounded, number = passed_on((mask, hidden, torch.arange(2)), torch.bfloat16)
    assert kept is mask
    assert (rounded.dtype, number.dtype) == (torch.bfloat16, torch.int64)
    assert passed_on(hidden, torch.float32) is hidden
