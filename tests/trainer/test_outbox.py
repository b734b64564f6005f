"""To whom a worker sends what, and what it sends again."""

from collections import deque

import msgspec
import torch

from bamboo_core.job.spec import RedundancyMode
from bamboo_core.planning.plan import Cell, Plan
from bamboo_trainer.frames.frame import Address, Again, FrameKind
from bamboo_trainer.routing.outbox import Outbox, Received
from bamboo_trainer.routing.plan_state import PlanState
from recording_transport import RecordingTransport
from replica_kit import planned

PLAN = planned(3, 1, 1, "a")
OWNER = [PLAN.at(Cell(0, s)).owner for s in range(3)]
SHADOW = [PLAN.at(Cell(0, s)).shadow for s in range(3)]


def outbox(worker: str, plan: Plan = PLAN) -> tuple[Outbox, RecordingTransport, deque[Received]]:
    sent, own = RecordingTransport(), deque[Received]()
    return Outbox(PlanState(worker, plan), sent, own), sent, own


def test_a_frame_goes_to_the_owner_of_its_cell_and_stays_in_the_log() -> None:
    box, sent, own = outbox(OWNER[0])
    box.emit(Address(FrameKind.ACTIVATION, 0, 1, 4, 2), [torch.ones(2)])
    ((peer, frame),) = sent.frames
    assert (peer, frame.epoch, frame.origin, own) == (OWNER[1], PLAN.epoch, PLAN.origin, deque())
    assert box.log.get(frame.address) is frame


def test_what_is_for_oneself_does_not_travel() -> None:
    box, sent, own = outbox(OWNER[1])
    box.emit(Address(FrameKind.ACTIVATION, 0, 1, 4, 2))
    assert sent.frames == []
    assert [(sender, frame.address.cell) for sender, frame in own] == [(OWNER[1], Cell(0, 1))]


def test_gradients_go_to_a_shadow_that_runs_backwards_in_advance() -> None:
    eager = msgspec.structs.replace(PLAN, mode=RedundancyMode.EAGER_BACKWARD)
    gradient, activation = (Address(kind, 0, 1, 4) for kind in (FrameKind.GRADIENT, FrameKind.ACTIVATION))
    sender = next(w for w in sorted(PLAN.worker_ids()) if w not in (OWNER[1], SHADOW[1]))
    for plan, address, receivers in (
        (eager, gradient, [OWNER[1], SHADOW[1]]),
        (eager, activation, [OWNER[1]]),
        (PLAN, gradient, [OWNER[1]]),
    ):
        box, sent, _ = outbox(sender, plan)
        box.emit(address)
        assert [peer for peer, _ in sent.frames] == receivers


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
        (OWNER[1], PLAN.epoch + 1, Again()),
        ("w9", PLAN.epoch + 1, Again()),
    ]


def test_links_lead_to_the_others_of_the_plan() -> None:
    box, sent, _ = outbox(OWNER[0])
    box.connect()
    assert sent.addresses == dict.fromkeys(PLAN.worker_ids() - {OWNER[0]}, ("h", 1))
