"""Owners that repeat a committed step: whom they ask, and when nobody can help."""

from collections import deque

import pytest

from bamboo_core.control.protocol import LeftBehind
from bamboo_core.planning.plan import Cell
from bamboo_trainer.commit.commit_log import CommitLog
from bamboo_trainer.commit.repeated_steps import Repeated, RepeatedSteps
from bamboo_trainer.frames.frame import ANSWERS_END, Address, Frame, FrameKind
from bamboo_trainer.frames.payloads import Commit
from bamboo_trainer.routing.outbox import Outbox
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.stage_states import StageStates
from recording_transport import RecordingTransport, Told
from replica_kit import planned
from stage_kit import StagesOfTask, small_task

PLAN = planned(3, 1, 1, "a")
CELL = Cell(0, 1)
OWNER = PLAN.at(CELL).owner
OTHERS = sorted(PLAN.worker_ids() - {OWNER})
ACTIVATION, GRADIENT = (Address(kind, *CELL, 5) for kind in (FrameKind.ACTIVATION, FrameKind.GRADIENT))


class One:
    """The owner of a stage in the middle; it has no states of its own."""

    def __init__(self, newest: int = 5) -> None:
        self.net, self.said, self.log = RecordingTransport(), Told(), CommitLog(0)
        self.plan = PlanState(OWNER, PLAN)
        self.outbox = Outbox(self.plan, self.net, deque())
        for step in range(newest + 1):
            self.log.record(step, Commit(norm=1.0, loss=1.0, microbatches=8, generation=0, epoch=1))
        states = StageStates(StagesOfTask(small_task()), False, {})
        self.steps = RepeatedSteps(self.plan, self.outbox, states, None, self.log, self.said)  # type: ignore[arg-type]

    def look(self, *lacks: Address) -> None:
        self.steps.look([Repeated(CELL, 5, lacks)], {})

    def answer(self, since: dict[Cell, int], epoch: int = PLAN.epoch) -> list[bool]:
        """Everybody's, on every link: the first step in their logs."""
        return [
            self.steps.answered(
                worker, Frame(address=Address(kind, *CELL, 5), epoch=epoch, payload=list(since.items()))
            )
            for worker in OTHERS
            for kind in ANSWERS_END
        ]


def test_everybody_is_asked_once_in_an_epoch_and_again_after_a_link_broke() -> None:
    one = One()
    one.look(ACTIVATION)
    one.look(ACTIVATION)
    assert [(peer, frame.address.kind) for peer, frame in one.net.take()] == [(w, FrameKind.ASK) for w in OTHERS]
    one.steps.ask_again()
    one.look(ACTIVATION)
    assert len(one.net.take()) == len(OTHERS)
    assert one.said == []


@pytest.mark.parametrize(
    ("lacks", "since", "left_behind"),
    [
        (ACTIVATION, {Cell(0, 0): 5}, False),  # the stage before has it in its log
        (ACTIVATION, {Cell(0, 0): 6}, True),
        (GRADIENT, {Cell(0, 0): 6}, False),
        (GRADIENT, {Cell(0, 2): 6}, True),
        (ACTIVATION, {}, False),  # who runs that stage now repeats the step as well
    ],
)
def test_what_nobody_has_nor_makes_again_is_told_once_all_have_answered(
    lacks: Address, since: dict[Cell, int], left_behind: bool
) -> None:
    one = One()
    one.look(lacks)
    one.look(lacks)
    assert one.said == [], "they have not answered"
    assert all(one.answer(since))
    one.look(lacks)
    assert one.said == ([LeftBehind(cell=CELL)] if left_behind else [])


def test_two_steps_behind_nobody_can_help() -> None:
    one = One(newest=6)
    one.look()
    assert one.said == [LeftBehind(cell=CELL)]


def test_answers_to_what_was_not_asked_do_not_count() -> None:
    one = One()
    assert not any(one.answer({}))
    one.look(ACTIVATION)
    assert not any(one.answer({Cell(0, 0): 6}, epoch=PLAN.epoch + 1))
    one.look(ACTIVATION)
    assert one.said == []


def test_whoever_is_asked_sends_what_its_log_has_and_says_that_this_was_all() -> None:
    one = One()
    one.outbox.emit(Address(FrameKind.ACTIVATION, 0, 2, 5))
    one.net.take()
    one.steps.answer("w9", Cell(0, 2), 5, {CELL: 4})
    sent = one.net.take()
    assert [frame.address.kind for _, frame in sent] == [FrameKind.ACTIVATION, *ANSWERS_END]
    assert {peer for peer, _ in sent} == {"w9"}
    assert [frame.payload for _, frame in sent[1:]] == [[(CELL, 4)]] * 3
