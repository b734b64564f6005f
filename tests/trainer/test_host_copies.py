"""What is sent is copied to host memory while the engine goes on: the order of frames and the bits stay the same.

On a device that is emulated; what a GPU does with streams and pinned memory has to be tried on one (test_gpu.py).
"""

import pytest
import torch
from test_engine import manifest

from bamboo.coordinator.events import Outcome
from bamboo.planning.plan import Cell
from bamboo_trainer.memory.host_copies import AtOnce, pinned_size
from bamboo_trainer.routing.outbox import Outbox
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.transport.frames import Address, FrameKind
from emulated_device import LateCopies
from recording_transport import RecordingTransport
from replica_kit import planned
from training_job import Job

PLAN = planned(3, 1, 1, "a")
OWNER = PLAN.at(Cell(0, 0)).owner


def box(*questions: int) -> tuple[Outbox, RecordingTransport, LateCopies]:
    sent, copies = RecordingTransport(), LateCopies(questions)
    return Outbox(PlanState(OWNER, PLAN), sent, lambda frame: None, copies), sent, copies


def activation(microbatch: int) -> Address:
    return Address(FrameKind.ACTIVATION, 0, 1, 4, microbatch)


def left(sent: RecordingTransport) -> list[int]:
    return [frame.address.microbatch for _, frame in sent.frames]


def test_host_memory_is_its_own_copy() -> None:
    tensor = torch.ones(3)
    copy = AtOnce().start([tensor])
    assert copy.ready()
    assert copy.wait()[0] is tensor


def test_pinned_memory_counts_as_torch_takes_it() -> None:
    assert [pinned_size(size) for size in (0, 1, 2, 3, 4096, 4097)] == [0, 1, 2, 4, 4096, 8192]


def test_a_boundary_tensor_leaves_when_it_is_copied_and_none_overtakes_another() -> None:
    outbox, sent, _ = box(3, 0, 0)
    for microbatch in range(3):
        outbox.emit(activation(microbatch), [torch.full((2,), float(microbatch))])
    assert left(sent) == []
    assert outbox.log.get(activation(1)) is None
    for _ in range(3):
        outbox.advance()
    assert left(sent) == [0, 1, 2]
    assert [frame.tensors[0].tolist() for _, frame in sent.frames] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert outbox.log.get(activation(1)) is sent.frames[1][1]


@pytest.mark.parametrize("what", ["another kind", "a repetition", "the end"])
def test_what_is_about_earlier_frames_waits_for_them(what: str) -> None:
    outbox, sent, copies = box(100)
    outbox.emit(activation(0), [torch.ones(2)])
    if what == "another kind":
        outbox.emit(Address(FrameKind.RESULT, 0, 1, 4), [torch.ones(2)])
    elif what == "a repetition":
        outbox.resend(Cell(0, 1))
    else:
        outbox.finish()
    assert sent.frames[0][1].address == activation(0)
    assert copies.started[0].waited
    assert what == "the end" or len(sent.frames) == 2


@pytest.mark.parametrize("pipelines", [1, 2])
def test_the_engine_goes_on_while_tensors_are_copied_and_the_bits_stay(pipelines: int) -> None:
    document = manifest(4 // pipelines, pipelines, mode="EagerForward", standby=1, steps=5)
    here, devices = Job(document).run(), list[LateCopies]()

    def device() -> LateCopies:
        devices.append(LateCopies([7, 0, 2, 11]))
        return devices[-1]

    calm = Job(document, copies=device).run()
    assert calm.state.losses == here.state.losses
    assert calm.digests == here.digests
    assert max(one.most for one in devices) > 1, "an instruction waited for the copy of the one before"
    names = {"Forward", "Backward", "ReduceGradients", "SyncReplicas", "OptimizerStep"}
    at = [f for f in calm.executed if f.step == 3 and f.cell == Cell(0, 1) and f.name in names]
    for fault in {(f.name, f.after): f for f in at}.values():
        disturbed = Job(document, (fault,), copies=lambda: LateCopies([7, 0, 2, 11])).run()
        assert not disturbed.faults, f"{fault} did not strike"
        assert disturbed.finish is not None
        assert disturbed.finish.outcome is Outcome.COMPLETE
        assert disturbed.state.losses == here.state.losses
        assert disturbed.digests == here.digests
