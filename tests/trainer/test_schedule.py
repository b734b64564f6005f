"""The order of forwards and backwards in a step."""

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
    Forward,
    StageOrder,
    one_f_one_b,
    zb_h1,
)
from bamboo_core.planning.steps.pipelines import awaited
from bamboo_trainer.engine.steps.schedule import needs
from bamboo_trainer.frames.frame import FrameKind

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
