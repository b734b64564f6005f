"""To whom a worker sends what, and what it sends again."""

from collections import deque
from collections.abc import Iterable

import msgspec
import pytest
import torch
from torch import Tensor

from bamboo_core.planning.plan import Cell, Plan
from bamboo_trainer.frames.frame import Address, FrameFacts, FrameKind
from bamboo_trainer.memory.host_copies import AtOnce, Copy, Parts
from bamboo_trainer.routing.outbox import Outbox, Received
from bamboo_trainer.routing.plan_state import PlanState
from recording_transport import RecordingTransport
from replica_kit import after_loss, planned

PLAN = planned(3, 1, 1, "a")
OWNER = [PLAN.at(Cell(0, s)).owner for s in range(3)]
SHADOW = [PLAN.at(Cell(0, s)).shadow for s in range(3)]


def outbox(worker: str, plan: Plan = PLAN) -> tuple[Outbox, RecordingTransport, deque[Received]]:
    sent, own = RecordingTransport(), deque[Received]()
    return Outbox(PlanState(worker, plan), sent, own), sent, own


def test_what_is_for_oneself_does_not_travel() -> None:
    box, sent, own = outbox(OWNER[1])
    box.emit(Address(FrameKind.ACTIVATION, 0, 1, 4, 2))
    assert sent.frames == []
    assert [(sender, frame.address.cell) for sender, frame in own] == [(OWNER[1], Cell(0, 1))]


class Slow(AtOnce):
    """Copies to host memory are made when they are waited for."""

    def start(self, tensors: Iterable[Tensor], *, bulk: bool = False) -> Copy:
        return Waiting(tuple(tensor.detach() for tensor in tensors))


class Waiting:
    def __init__(self, originals: Parts) -> None:
        self._originals = originals

    def ready(self) -> bool:
        return False

    def wait(self) -> Parts:
        return tuple(tensor.clone() for tensor in self._originals)


def test_what_a_stage_gives_another_of_its_worker_is_there_before_the_log_has_its_copy() -> None:
    sent, own, state = RecordingTransport(), deque[Received](), PlanState(OWNER[1], PLAN)
    box, given = Outbox(state, sent, own, Slow()), torch.ones(2)
    address = Address(FrameKind.ACTIVATION, 0, 1, 4, 2)
    box.emit(address, [given])
    ((_, frame),) = own
    assert frame.tensors[0].data_ptr() == given.data_ptr()
    assert box.log.get(address) is None
    box.finish()
    logged = box.log.get(address)
    assert logged is not None
    assert logged.tensors[0].data_ptr() != given.data_ptr()
    assert (len(own), sent.frames) == (1, [])
    box.emit(address._replace(microbatch=3), [given])
    state.activate(after_loss(PLAN, {OWNER[1]}))
    box.finish()
    assert [peer for peer, _ in sent.frames] == [state.owner(Cell(0, 1))], "who runs the cell by now gets it, too"


@pytest.mark.parametrize("kind", [FrameKind.RESULT, FrameKind.READY])
def test_what_is_no_boundary_tensor_is_copied_first(kind: FrameKind) -> None:
    sent, own = RecordingTransport(), deque[Received]()
    box = Outbox(PlanState(OWNER[1], PLAN), sent, own, Slow())
    box.emit(Address(kind, 0, 1, 4), [torch.ones(2)])
    assert not own
    box.finish()
    assert len(own) == 1


def test_what_is_sent_again_says_so_and_has_the_epoch_of_now() -> None:
    state, sent = PlanState(OWNER[0], PLAN), RecordingTransport()
    box = Outbox(state, sent, deque())
    box.emit(Address(FrameKind.ACTIVATION, 0, 1, 4, 0), [torch.ones(2)])
    box.emit(Address(FrameKind.ACTIVATION, 0, 2, 4, 0))
    state.activate(msgspec.structs.replace(PLAN, epoch=PLAN.epoch + 1))
    sent.frames.clear()
    box.resend(Cell(0, 1))
    box.resend(Cell(0, 1), worker="w9")
    assert [(peer, frame.epoch, frame.payload) for peer, frame in sent.frames] == [
        (OWNER[1], PLAN.epoch + 1, FrameFacts(again=True)),
        ("w9", PLAN.epoch + 1, FrameFacts(again=True)),
    ]
