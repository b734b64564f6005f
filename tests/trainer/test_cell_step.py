"""A cell's work on one step: order of forwards and backwards, awaited and dropped frames, kept sums of groups."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.job.spec import PipelineSchedule
from bamboo_core.planning.grid import make_layout
from bamboo_core.planning.plan import Cell, Layout
from bamboo_core.planning.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Computed,
    Evaluate,
    Forward,
    ReportReady,
    StageOrder,
    SyncReplicas,
    one_f_one_b,
    zb_h1,
)
from bamboo_core.planning.steps.pipelines import awaited
from bamboo_trainer.engine.cell_step import CellStep, TakeoverProgress, needs
from bamboo_trainer.engine.portions import KeptSums, Pace
from bamboo_trainer.frames import Address, Frame, FrameKind
from bamboo_trainer.stage.stage import Stage, build_stage
from stage_kit import CONFIG, small_task

stages = st.integers(1, 9)
microbatches = st.integers(1, 20)
orders = st.builds(StageOrder, st.sampled_from(PipelineSchedule), st.booleans())


def test_one_stage_in_the_middle() -> None:
    F, B = Forward, Backward
    assert one_f_one_b(1, 3, [0, 1, 2, 3]) == [F(0), F(1), F(2), B(0), F(3), B(1), B(2), B(3)]


def test_the_last_stage_never_looks_ahead() -> None:
    assert one_f_one_b(2, 3, [4, 7]) == [Forward(4), Backward(4), Forward(7), Backward(7)]


@given(stages, microbatches, st.data())
def test_all_is_done_once_in_order_and_bounded(p: int, m: int, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, p - 1))
    program = one_f_one_b(stage, p, range(m))
    assert [i.microbatch for i in program if isinstance(i, Forward)] == list(range(m))
    assert [i.microbatch for i in program if isinstance(i, Backward)] == list(range(m))
    held = most = 0
    for instruction in program:
        held += 1 if isinstance(instruction, Forward) else -1
        most = max(most, held)
        assert held >= 0
    assert most == min(m, 1 + 2 * (p - 1 - stage))


def test_weight_gradients_are_postponed_by_more_in_later_stages() -> None:
    F, B, W = Forward, BackwardInput, BackwardWeight
    assert zb_h1(0, 3, [0, 1, 2, 3]) == one_f_one_b(0, 3, [0, 1, 2, 3])
    assert zb_h1(1, 3, [0, 1, 2]) == [F(0), F(1), F(2), B(0), B(1), W(0), B(2), W(1), W(2)]
    assert zb_h1(1, 3, [0, 1, 2, 3]) == [F(0), F(1), F(2), B(0), F(3), B(1), B(2), W(0), B(3), W(1), W(2), W(3)]
    assert zb_h1(2, 3, [4, 7]) == [F(4), B(4), F(7), B(7), W(4), W(7)]


def test_in_a_takeover_weight_gradients_come_after_the_next_input_gradients() -> None:
    F, B, W = Forward, BackwardInput, BackwardWeight
    order = StageOrder().taken_over()
    assert order.program(2, 3, [4, 7]) == [F(4), B(4), F(7), B(7), W(4), W(7)]
    assert order.program(0, 2, range(3)) == [F(0), F(1), F(2), B(0), B(1), W(0), B(2), W(1), W(2)]
    assert order.program(0, 1, range(2)) == one_f_one_b(0, 1, range(2)), "nobody waits"
    postponed = StageOrder(PipelineSchedule.ZB_H1)
    assert postponed.taken_over().program(1, 3, range(4)) == postponed.program(1, 3, range(4))


@given(stages, microbatches, orders, st.data())
def test_no_schedule_keeps_more_than_it_says(p: int, m: int, order: StageOrder, data: st.DataObject) -> None:
    """ZB-H1 keeps what the first stage keeps in 1F1B. Weight gradients come in order, each after its backward."""
    stage = data.draw(st.integers(0, p - 1))
    plain, program = one_f_one_b(stage, p, range(m)), order.program(stage, p, range(m))
    assert [(isinstance(i, Forward), i.microbatch) for i in program if not isinstance(i, BackwardWeight)] == [
        (isinstance(i, Forward), i.microbatch) for i in plain
    ]
    backwards = [i.microbatch for i in program if isinstance(i, BackwardInput)]
    assert [i.microbatch for i in program if isinstance(i, BackwardWeight)] == backwards
    flying = most = 0
    for place, instruction in enumerate(program):
        if isinstance(instruction, BackwardWeight):
            assert BackwardInput(instruction.microbatch) in program[:place]
        flying += isinstance(instruction, Forward)
        flying -= isinstance(instruction, BackwardWeight) or type(instruction) is Backward
        most = max(most, flying)
    assert flying == 0
    assert most <= order.in_flight(stage, p, m) <= order.in_flight(0, p, m)
    assert stage > 0 or most == order.in_flight(stage, p, m)


@given(stages, microbatches)
def test_no_stage_waits_for_ever(p: int, m: int) -> None:
    """Fill, work and drain, however fast the network is: as long as it takes without any waiting."""
    plain = StageOrder(PipelineSchedule.ONE_F_ONE_B)
    assert _makespan(p, m, plain, forward=1, backward=2, way=0) == 3 * (m + p - 1)
    assert _makespan(p, m, plain.taken_over(), forward=1, backward=2, way=0) <= 3 * (m + p - 1)


@given(stages, microbatches)
def test_postponed_weight_gradients_leave_a_third_of_the_bubbles(p: int, m: int) -> None:
    """Where forwards, input gradients and weight gradients take equally long, and there are enough microbatches."""
    time = _makespan(p, m, StageOrder(PipelineSchedule.ZB_H1), forward=1, backward=2, way=0)
    assert time <= 3 * (m + p - 1)
    if m >= p:
        assert time == 3 * m + p - 1


def _source(instruction: Computed, stage: int, stages: int) -> tuple[type, int, int] | None:
    if isinstance(instruction, Forward):
        return (Forward, stage - 1, instruction.microbatch) if stage > 0 else None
    if isinstance(instruction, BackwardWeight):
        return None
    return (Backward, stage + 1, instruction.microbatch) if stage < stages - 1 else None


def test_one_microbatch_ahead_hides_the_way_to_the_neighbour() -> None:
    """4 stages, 8 microbatches, forward 10, backward 20, way 5: only the fill and the drain still wait for the way."""
    assert _makespan(4, 8, StageOrder(), forward=10, backward=20, way=5) == 11 * 30 + 6 * 5


def _makespan(p: int, m: int, order: StageOrder, *, forward: int, backward: int, way: int) -> int:
    """backward: of a whole one; its parts take half of it each."""
    seconds = {Forward: forward, Backward: backward, BackwardInput: backward // 2, BackwardWeight: backward // 2}
    programs = [order.program(s, p, range(m)) for s in range(p)]
    ends: dict[tuple[type, int, int], int] = {}
    free = [0] * p
    for _ in range(3 * p * m):  # each round does something, or there is a deadlock
        for s, program in enumerate(programs):
            while program:
                source = _source(program[0], s, p)
                if source is not None and source not in ends:
                    break
                instruction = program.pop(0)
                begin = max(free[s], ends[source] + way if source is not None else 0)
                free[s] = begin + seconds[type(instruction)]
                kind = Backward if isinstance(instruction, Backward) else type(instruction)
                ends[kind, s, instruction.microbatch] = free[s]
    assert not any(programs), "a deadlock"
    return max(free)


@given(stages, microbatches, orders)
def test_the_simulator_waits_for_what_the_engine_waits_for(p: int, m: int, order: StageOrder) -> None:
    layout = make_layout(0, m, 1, None)
    for stage in range(p):
        for instruction in order.program(stage, p, range(m)):
            frames = needs(instruction, Cell(0, stage), p, layout, 0, ())
            expected = [(address.kind is FrameKind.ACTIVATION, address.microbatch) for address in frames]
            frame = awaited(instruction, stage, p)
            assert expected == ([] if frame is None else [frame])


CELL = Cell(0, 1)


def summed(first: int, end: int, step: int = 4) -> Frame:
    return Frame(address=Address(FrameKind.PARTIAL_SUM, *CELL, step, first, end), epoch=1)


def test_a_larger_sum_takes_the_place_of_its_parts() -> None:
    kept = KeptSums()
    for frame in (summed(0, 2), summed(2, 4), summed(0, 4), summed(4, 6), summed(4, 6)):
        kept.keep(frame)
    assert kept.of(CELL, 4, (0, 8)) == [summed(0, 4), summed(4, 6)]
    assert kept.of(CELL, 4, (0, 5)) == [summed(0, 4)]
    assert kept.of(CELL, 4, (0, 3)) == []
    assert kept.of(CELL, 4, (4, 8)) == [summed(4, 6)]


def test_behind_a_gap_nothing_counts() -> None:
    kept = KeptSums()
    for frame in (summed(0, 2), summed(4, 6)):
        kept.keep(frame)
    assert kept.of(CELL, 4, (0, 8)) == [summed(0, 2)]
    kept.keep(summed(2, 4))
    assert len(kept.of(CELL, 4, (0, 8))) == 3


def test_only_the_newest_step_of_a_cell_is_kept_until_it_is_committed() -> None:
    kept = KeptSums()
    kept.keep(summed(0, 2, step=4))
    kept.keep(summed(0, 4, step=5))
    kept.keep(summed(2, 4, step=4))
    assert (kept.of(CELL, 4, (0, 8)), kept.of(CELL, 5, (0, 8))) == ([], [summed(0, 4, step=5)])
    assert kept.of(Cell(1, 1), 5, (0, 8)) == []
    kept.committed(4)
    assert kept.of(CELL, 5, (0, 8))
    kept.committed(5)
    assert not kept.of(CELL, 5, (0, 8))


@pytest.mark.parametrize("lasts", [0, 1, 2, 5])
def test_a_sum_is_on_its_way_for_half_of_the_time_at_most(lasts: int) -> None:
    """lasts: microbatches for which one is on its way."""
    pace, until, sent = Pace(), 0, 0
    for microbatch in range(100):
        if pace.allows(is_sending=microbatch < until):
            sent, until = sent + 1, microbatch + 1 + lasts
    assert sent == -(-100 // (2 * lasts + 1))


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
    one.accept(first)
    one.accept(activation(0))
    assert one.take(first.address) is first
    one.accept(activation(0))
    assert one.inbox == {}


def test_frames_of_later_steps_wait_and_those_of_earlier_ones_are_no_use(stage: Stage) -> None:
    one = started(stage)
    one.step = 5
    one.accept(activation(0, step=4))
    one.accept(activation(0, step=6))
    assert [address.step for address in one.inbox] == [6]


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
