"""Copies between devices and host memory overlap with computation, and change neither the order of frames nor the bits.

Devices are emulated in virtual time; test_gpu.py tries streams and pinned memory on a GPU.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import cycle

import pytest
import torch
from test_engine import manifest
from torch import Tensor

from bamboo_core.planning.plan import Cell
from bamboo_trainer.frames import Address, FrameKind
from bamboo_trainer.memory.host_copies import AtOnce, Copy, Parts, pinned_size
from bamboo_trainer.routing import Outbox, PlanState
from queued_device import QueuedJob, Speed
from recording_transport import RecordingTransport
from replica_kit import planned
from training_job import Job, check_same_bits


class LateCopy:
    """A copy of the values at its start, as on a GPU's stream. Its first `questions` calls of `ready` return False."""

    def __init__(self, tensors: Iterable[Tensor], questions: int) -> None:
        self.questions, self.waited = questions, False
        self._parts = tuple(tensor.detach().clone() for tensor in tensors)

    def ready(self) -> bool:
        self.questions -= 1
        return self.questions < 0

    def wait(self) -> Parts:
        self.waited = self.questions >= 0
        return self._parts


class LateCopies(AtOnce):
    """Copies that become ready late. questions: for each copy in turn, the calls of `ready` before it is ready. most:
    the largest number of copies in progress at once.
    """

    def __init__(self, questions: Sequence[int]) -> None:
        super().__init__()
        self._questions = cycle(questions)
        self.started: list[LateCopy] = []
        self.most = 0

    def start(self, tensors: Iterable[Tensor], *, bulk: bool = False) -> Copy:
        self.started.append(LateCopy(tensors, next(self._questions)))
        under_way = [copy for copy in self.started[-16:] if copy.questions >= 0 and not copy.waited]
        self.most = max(self.most, len(under_way))
        return self.started[-1]


PLAN = planned(3, 1, 1, "a")
OWNER = PLAN.at(Cell(0, 0)).owner


def box(*questions: int) -> tuple[Outbox, RecordingTransport, LateCopies]:
    sent, copies = RecordingTransport(), LateCopies(questions)
    return Outbox(PlanState(OWNER, PLAN), sent, deque(), copies), sent, copies


def activation(microbatch: int) -> Address:
    return Address(FrameKind.ACTIVATION, 0, 1, 4, microbatch)


def left(sent: RecordingTransport) -> list[int]:
    return [frame.address.microbatch for _, frame in sent.frames]


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


def test_a_large_frame_of_another_lane_holds_up_no_boundary_tensor_and_no_report() -> None:
    outbox, sent, _ = box(100, 0, 0)
    outbox.post("peer", Address(FrameKind.SYNC, 0, 1, 4), [torch.ones(2)], [])
    outbox.emit(activation(0), [torch.ones(2)])
    outbox.emit(Address(FrameKind.READY, 0, 2, 4), payload="report")
    assert [frame.address.kind for _, frame in sent.frames] == [FrameKind.ACTIVATION, FrameKind.READY]
    outbox.finish()
    assert [peer for peer, _ in sent.frames][2:] == ["peer"]
    assert outbox.log.get(Address(FrameKind.SYNC, 0, 1, 4)) is None


@pytest.mark.parametrize("what", ["another kind", "a repetition", "the end"])
def test_what_is_about_earlier_frames_waits_for_them(what: str) -> None:
    outbox, sent, copies = box(100)
    outbox.emit(activation(0), [torch.ones(2)])
    if what == "another kind":
        outbox.emit(Address(FrameKind.READY, 0, 2, 4))
        assert sent.frames == []
        outbox.finish()
    elif what == "a repetition":
        outbox.resend(Cell(0, 1))
    else:
        outbox.finish()
    assert sent.frames[0][1].address == activation(0)
    assert copies.started[0].waited
    assert what == "the end" or len(sent.frames) == 2


@pytest.mark.parametrize("pipelines", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_engine_goes_on_while_tensors_are_copied_and_the_bits_stay(pipelines: int) -> None:
    document = manifest(4 // pipelines, pipelines, standby=1, steps=5)
    here, devices = Job(document).run(), list[LateCopies]()

    def device() -> LateCopies:
        devices.append(LateCopies([7, 0, 2, 11]))
        return devices[-1]

    calm = Job(document, copies=device).run()
    check_same_bits(here, calm)
    assert max(one.most for one in devices) > 1, "an instruction waited for the copy of the one before"
    names = {"Forward", "Backward", "ReduceGradients", "SyncReplicas", "OptimizerStep"}
    at = [f for f in calm.executed if f.step == 3 and f.cell == Cell(0, 1) and f.name in names]
    for fault in {f.name: f for f in at}.values():  # after the last of each kind, with copies under way
        check_same_bits(here, Job(document, (fault,), copies=lambda: LateCopies([7, 0, 2, 11])).run())


def queued(mode: str, **more: float) -> QueuedJob:
    """Return a job with two stages and eight microbatches. A stage takes 8 ms for a forward, 16 ms for a backward."""
    document = manifest(2, 1, mode=mode, steps=7)
    document["spec"]["training"]["globalBatchSize"] = 16
    return QueuedJob(document, Speed(forward=0.008, backward=0.016, **more))


MEASURED, ORDINARY = 1, 5  # an early step, and a later one


def test_copies_are_made_while_the_device_computes() -> None:
    """Copies overlap with computation, although a tensor takes 9 ms to the next stage instead of 1 ms. Only copies of
    the first and the last tensor, of the targets and of the report are not hidden: 24 ms and a few turns of the host.
    Without overlap, each of the eight microbatches would take 24 ms longer.
    """
    fast, slow = queued("None").run(), queued("None", copy=0.004).run()
    assert slow.state.progress.losses == fast.state.progress.losses
    assert slow.digests == fast.digests
    assert 8 * 0.024 <= fast.step_seconds(ORDINARY) <= 9 * 0.024 + 0.02
    for step in (MEASURED, ORDINARY):
        assert slow.step_seconds(step) - fast.step_seconds(step) <= 0.04


def test_a_step_is_committed_before_its_gradients_are_copied_for_replicas() -> None:
    fast, slow = queued("Replicas").run(), queued("Replicas", bulk=0.1).run()
    assert slow.digests == fast.digests
    assert slow.step_seconds(ORDINARY) - fast.step_seconds(ORDINARY) <= 0.003


def test_the_engine_does_not_wait_for_the_device_where_it_measures_either() -> None:
    job = queued("Replicas", copy=0.004, bulk=0.02).run()
    assert [job.waits[step] - job.waits[step - 1] for step in (MEASURED, ORDINARY)] == [0, 0]
