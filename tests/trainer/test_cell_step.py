"""A cell's work in one step: instruction order of schedules, evaluations, kept frames, and the most urgent cell."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.job.spec import PipelineSchedule
from bamboo_core.planning.grid import make_layout
from bamboo_core.planning.plan import Cell
from bamboo_core.planning.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Computed,
    Evaluate,
    Forward,
    ReportReady,
    ScatterGradients,
    StageOrder,
    SyncReplicas,
    one_f_one_b,
    program,
)
from bamboo_core.planning.steps.pipelines import awaited
from bamboo_trainer.engine.cell_step import CellStep, needs
from bamboo_trainer.frames import Address, Frame, FrameKind
from bamboo_trainer.stage.stage import Stage, build_stage
from stage_kit import CONFIG, small_task

stages = st.integers(1, 9)
microbatches = st.integers(1, 20)
orders = st.builds(StageOrder, st.sampled_from(PipelineSchedule), st.booleans())


F, B, BI, W = Forward, Backward, BackwardInput, BackwardWeight
PLAIN, POSTPONED = StageOrder(PipelineSchedule.ONE_F_ONE_B), StageOrder(PipelineSchedule.ZB_H1)
TAKEN_OVER = PLAIN.taken_over()


@pytest.mark.parametrize(
    ("order", "stage", "of", "microbatches", "expected"),
    [
        (PLAIN, 1, 3, range(4), [F(0), F(1), F(2), B(0), F(3), B(1), B(2), B(3)]),
        (PLAIN, 2, 3, [4, 7], [F(4), B(4), F(7), B(7)]),
        (POSTPONED, 0, 3, range(4), one_f_one_b(0, 3, range(4))),
        (POSTPONED, 1, 3, range(3), [F(0), F(1), F(2), BI(0), BI(1), W(0), BI(2), W(1), W(2)]),
        (
            POSTPONED,
            1,
            3,
            range(4),
            [F(0), F(1), F(2), BI(0), F(3), BI(1), BI(2), W(0), BI(3), W(1), W(2), W(3)],
        ),
        (POSTPONED, 2, 3, [4, 7], [F(4), BI(4), F(7), BI(7), W(4), W(7)]),
        (TAKEN_OVER, 2, 3, [4, 7], [F(4), BI(4), F(7), BI(7), W(4), W(7)]),
        (TAKEN_OVER, 0, 2, range(3), [F(0), F(1), F(2), BI(0), BI(1), W(0), BI(2), W(1), W(2)]),
        (TAKEN_OVER, 0, 1, range(2), one_f_one_b(0, 1, range(2))),
        (POSTPONED.taken_over(), 1, 3, range(4), POSTPONED.program(1, 3, range(4))),
    ],
)
def test_the_program_of_a_stage(order, stage, of, microbatches, expected) -> None:
    """ZB-H1 postpones weight gradients from the second stage on, by more in later ones; 1F1B only after a takeover."""
    assert order.program(stage, of, microbatches) == expected


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


@given(stages, microbatches, orders, st.data())
def test_no_schedule_keeps_more_than_it_says(p: int, m: int, order: StageOrder, data: st.DataObject) -> None:
    """A stage keeps the activations of at most `in_flight` microbatches, never more than the first stage's limit.

    Forwards and backwards come in the order of 1F1B, and weight gradients in the order of the input gradients; each
    weight gradient comes after its microbatch's input gradient.
    """
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


@given(stages, orders, st.integers(2, 60), st.integers(2, 12), st.integers(1, 3), st.data())
def test_each_sum_is_sent_once_as_soon_as_it_is_final(
    p: int, order: StageOrder, m: int, pipelines: int, buckets: int, data: st.DataObject
) -> None:
    """Unless portions share the cell, each sum but the last is sent directly after its last microbatch is computed."""
    layout = make_layout(0, m, min(pipelines, m), data.draw(st.integers(min(pipelines, m), m)))
    cell = Cell(data.draw(st.integers(0, layout.pipelines - 1)), data.draw(st.integers(0, p - 1)))
    portions = data.draw(
        st.sampled_from([(), ((layout.split[cell.pipeline][0], layout.split[cell.pipeline][-1] + 1),)])
    )
    steps = program(cell, p, layout, False, order, portions, buckets)
    sent = [one for one in steps if isinstance(one, ScatterGradients)]
    sums = layout.sums(cell.pipeline)
    assert sorted((one.node, one.bucket) for one in sent) == [(node, b) for node in sums for b in range(buckets)]
    for node in () if portions else sums[:-1]:
        of_node = [place for place, one in enumerate(steps) if getattr(one, "node", None) == node]
        before, after = steps[: of_node[0]], steps[of_node[-1] + 1 :]
        assert of_node == [*range(of_node[0], of_node[-1] + 1)]
        assert before[-1].microbatch == layout.bounds[node.end] - 1
        assert all(one.microbatch != before[-1].microbatch for one in after if isinstance(one, Computed))


@given(stages, microbatches, orders)
def test_the_simulator_waits_for_what_the_engine_waits_for(p: int, m: int, order: StageOrder) -> None:
    layout = make_layout(0, m, 1, 1)
    for stage in range(p):
        for instruction in order.program(stage, p, range(m)):
            frames = needs(instruction, Cell(0, stage), p, layout, 0, ())
            expected = [(address.kind is FrameKind.ACTIVATION, address.microbatch) for address in frames]
            frame = awaited(instruction, stage, p)
            assert expected == ([] if frame is None else [frame])


SPLIT = [(0, 2), (2, 3)]
LAYOUT = make_layout(0, 3, 1, 1)
CELL = Cell(0, 1)  # the last stage
ALL = [Forward(0), Backward(0), Forward(1), Backward(1), Forward(2), Backward(2), SyncReplicas(), ReportReady()]


@pytest.fixture(scope="module")
def stage() -> Stage:
    return build_stage(small_task(), 1, SPLIT, CONFIG)


def started(stage: Stage, batches: int, *, only: bool = False) -> CellStep:
    one = CellStep(CELL)
    one.start(stage, 2, LAYOUT, (), batches, only_evaluates=only)
    return one


def activation(microbatch: int, step: int = 0, width: int = 3) -> Frame:
    address = Address(FrameKind.ACTIVATION, *CELL, step, microbatch)
    return Frame(address=address, epoch=1, origin=0, tensors=(torch.ones(2, width),))


def test_an_evaluation_comes_before_the_step_and_is_left_out_once_the_step_is_committed(stage: Stage) -> None:
    one = started(stage, 2)
    assert one.program == [Evaluate(0), Evaluate(1), *ALL]
    one.done = 1
    one.skip_evaluation()
    assert one.program[one.done :] == ALL
    one.skip_evaluation()
    assert one.program[one.done :] == ALL
    assert started(stage, 1, only=True).program == [Evaluate(0), ReportReady()]


def test_the_first_copy_of_a_frame_counts_and_none_after_it_was_taken(stage: Stage) -> None:
    one, first = started(stage, 0), activation(0)
    one.accept(first)
    one.accept(activation(0))
    assert one.take(first.address) is first
    one.accept(activation(0))
    assert one.inbox == {}


def test_frames_of_later_steps_wait_and_those_of_earlier_ones_are_no_use(stage: Stage) -> None:
    one = started(stage, 0)
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
