"""Routing of frames: the message log, pending plans, copies before sending, and frames sent again."""

from collections import deque
from collections.abc import Iterable

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bamboo_core.planning.plan import Cell, Plan
from bamboo_trainer.frames import Address, Frame, FrameFacts, FrameKind
from bamboo_trainer.memory.host_copies import AtOnce, Copy, Parts
from bamboo_trainer.routing import MessageLog, Outbox, PlanState, Received
from recording_transport import RecordingTransport
from replica_kit import after_loss, planned
from stage_kit import storages

TENSORS = [torch.zeros(n) for n in (1, 8, 64)]


actions = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.lists(st.integers(0, 2), max_size=2)))


@given(actions)
def test_the_log_holds_the_newest_frames_of_two_steps(what: list[tuple[int, int, list[int]]]) -> None:
    log, kept = MessageLog(), dict[Address, list[int]]()
    for step, place, parts in what:
        if place == 2:
            log.committed(step)
            kept = {address: held for address, held in kept.items() if address.step >= step}
            continue
        address = Address(FrameKind.ACTIVATION, 0, place, step)
        kept[address] = parts
        log.add(Frame(address=address, epoch=1, tensors=tuple(TENSORS[i][:1] for i in parts)))
    expected = storages([TENSORS[i] for held in kept.values() for i in held])
    assert storages([tensor for frame in log.frames() for tensor in frame.tensors]) == expected


FIRST = planned(2, 1, 1, "a")


def plan(epoch: int, *, boundary: bool = False) -> Plan:
    return msgspec.structs.replace(FIRST, epoch=epoch, boundary=boundary)


def test_a_newer_plan_overtakes_the_one_that_waits() -> None:
    state = PlanState("w0", plan(1))
    state.offer(plan(2, boundary=True))
    state.activate(plan(3))
    assert state.pending is None
    state.offer(plan(5, boundary=True))
    state.activate(plan(4))
    assert state.pending is not None


PLAN = planned(3, 1, 1, "a")
OWNER = [PLAN.at(Cell(0, s)).owner for s in range(3)]
SHADOW = [PLAN.at(Cell(0, s)).shadow for s in range(3)]


class Slow(AtOnce):
    """Copies to host memory that are made only when the caller waits for them."""

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
