"""A step's report is on its way before the final gradients, which take long to copy from a device, are sent."""

import pytest

from bamboo.planning.plan import WorkerId
from bamboo_trainer.transport.frames import Frame, FrameKind
from manifest_kit import bamboojob, gpt_task, training
from memory_transport import MemoryTransport
from training_job import Job

REPORTED = 3  # steps that all workers report with replicas in step


def test_ready_goes_before_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    document = bamboojob(task=gpt_task(context=8), training=training(6, 4, 2), topology={"stages": 3})
    sent: dict[tuple[WorkerId, int], list[FrameKind]] = {}
    send = MemoryTransport.send

    def noting(self: MemoryTransport, peer: WorkerId, frame: Frame) -> None:
        if frame.address.kind in (FrameKind.READY, FrameKind.SYNC):
            sent.setdefault((self.worker, frame.address.step), []).append(frame.address.kind)
        send(self, peer, frame)

    monkeypatch.setattr(MemoryTransport, "send", noting)
    Job(document).run()
    both = [kinds for kinds in sent.values() if len(set(kinds)) == 2]
    assert len(both) >= 2 * REPORTED, sent
    assert all(kinds[0] is FrameKind.READY for kinds in both), sent
