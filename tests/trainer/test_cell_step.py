"""A cell's work on one step: what it waits for, keeps and drops."""

import pytest
import torch

from bamboo_core.planning.grid import make_layout
from bamboo_core.planning.plan import Cell, Layout
from bamboo_core.planning.schedule import (
    Backward,
    Evaluate,
    Forward,
    ReportReady,
    SyncReplicas,
)
from bamboo_trainer.engine.steps.cell_step import CellStep, TakeoverProgress
from bamboo_trainer.frames.frame import Address, Frame, FrameKind
from bamboo_trainer.frames.payloads import RefusedFrame
from bamboo_trainer.stage.stage import Stage, build_stage
from stage_kit import CONFIG, small_task

SPLIT = [(0, 2), (2, 3)]
LAYOUT = make_layout(0, 3, 1, None)
CELL = Cell(0, 1)  # the last stage
ALL = [Forward(0), Backward(0), Forward(1), Backward(1), Forward(2), Backward(2), SyncReplicas(), ReportReady()]


@pytest.fixture(scope="module")
def stage() -> Stage:
    return build_stage(small_task(), 1, SPLIT, CONFIG)


def started(stage: Stage, layout: Layout | None = LAYOUT, batches: int = 0, *, only: bool = False) -> CellStep:
    one = CellStep(CELL)
    one.start(stage, 2, layout, (), batches, only_evaluates=only)
    return one


def activation(microbatch: int, step: int = 0, width: int = 3) -> Frame:
    address = Address(FrameKind.ACTIVATION, *CELL, step, microbatch)
    return Frame(address=address, epoch=1, origin=0, tensors=(torch.ones(2, width),))


def test_a_step_begins_at_the_stages_version_with_nothing_done(stage: Stage) -> None:
    one = started(stage)
    assert (one.step, one.done, one.program, one.next) == (stage.values.version, 0, ALL, Forward(0))
    assert one.work is not None
    assert one.awaits_gradients


def test_a_cell_without_a_layout_waits_and_one_that_is_not_in_it_does_nothing(stage: Stage) -> None:
    for one in (started(stage, None), CellStep(Cell(1, 1))):
        if one.layout is None and one.step < 0:
            one.start(stage, 2, LAYOUT, ())
        assert (one.program, one.work, one.next) == ([], None, None)


def test_an_evaluation_comes_before_the_step_and_is_left_out_once_the_step_is_committed(stage: Stage) -> None:
    one = started(stage, batches=2)
    assert one.program == [Evaluate(0), Evaluate(1), *ALL]
    one.done = 1
    one.skip_evaluation()
    assert one.program[one.done :] == ALL
    one.skip_evaluation()
    assert one.program[one.done :] == ALL
    assert started(stage, batches=1, only=True).program == [Evaluate(0), ReportReady()]


def test_the_first_copy_of_a_frame_counts_and_none_after_it_was_taken(stage: Stage) -> None:
    one, first = started(stage), activation(0)
    one.accept(first, stage)
    one.accept(activation(0), stage)
    assert one.take(first.address) is first
    one.accept(activation(0), stage)
    assert one.inbox == {}


def test_frames_of_later_steps_wait_and_those_of_earlier_ones_are_no_use(stage: Stage) -> None:
    one = started(stage)
    one.step = 5
    one.accept(activation(0, step=4), stage)
    one.accept(activation(0, step=6), stage)
    assert [address.step for address in one.inbox] == [6]


def test_what_does_not_fit_is_refused_or_dropped_when_its_step_begins(stage: Stage) -> None:
    """What came before the step is looked at then: it was not known what would fit."""
    address = Address(FrameKind.RESULT, *CELL, 0, 0, 5)  # of a pipeline that is not there
    misfit = Frame(address=address, epoch=1, origin=0, tensors=(torch.ones(1),))
    with pytest.raises(RefusedFrame):
        started(stage).accept(misfit, stage)
    early = CellStep(CELL)
    early.accept(misfit, None)
    early.accept(activation(1), None)
    assert len(early.inbox) == 2
    early.start(stage, 2, LAYOUT, ())
    assert [address.microbatch for address in early.inbox] == [1]


def test_the_oldest_step_is_the_most_urgent_then_backwards_then_later_stages() -> None:
    def at(step: int, stage: int, instruction: Forward | Backward) -> CellStep:
        return CellStep(Cell(0, stage), step=step, program=[instruction])

    ordered = [
        at(3, 0, Forward(5)),
        at(4, 1, Backward(0)),
        at(4, 0, Backward(0)),
        at(4, 1, Forward(0)),
        at(4, 0, Forward(0)),
    ]
    found = ordered[::-1]
    found.sort(key=lambda one: one.urgency)
    assert found == ordered


def test_own_gradients_are_awaited_until_the_last_of_them_is_there(stage: Stage) -> None:
    one = started(stage)
    one.done = len(ALL) - 3
    assert one.awaits_gradients
    one.done += 1
    assert not one.awaits_gradients


def test_a_takeover_counts_what_is_repeated() -> None:
    taken = TakeoverProgress(0.0, 0.0, 0.0)
    for instruction in (Forward(0), Backward(0), Forward(1), ReportReady()):
        taken.count(instruction)
    taken.repeated_elsewhere(3)
    assert (taken.forwards, taken.backwards) == (5, 4)
