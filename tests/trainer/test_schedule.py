"""The order of forwards and backwards in a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo.planning.grid import make_layout
from bamboo.planning.plan import Cell
from bamboo.planning.schedule import Backward, Forward, one_f_one_b
from bamboo.simulation.job.pipelines import awaited
from bamboo_trainer.engine.steps.schedule import needs
from bamboo_trainer.transport.frames import FrameKind

stages = st.integers(1, 9)
microbatches = st.integers(1, 20)
lookaheads = st.integers(0, 4)


def test_one_stage_in_the_middle() -> None:
    F, B = Forward, Backward
    assert one_f_one_b(1, 3, [0, 1, 2, 3]) == [F(0), F(1), B(0), F(2), B(1), F(3), B(2), B(3)]
    assert one_f_one_b(1, 3, [0, 1, 2, 3], 1) == [F(0), F(1), F(2), B(0), F(3), B(1), B(2), B(3)]


def test_the_last_stage_never_looks_ahead() -> None:
    assert one_f_one_b(2, 3, [4, 7], 3) == [Forward(4), Backward(4), Forward(7), Backward(7)]


@given(stages, microbatches, lookaheads, st.data())
def test_all_is_done_once_in_order_and_bounded(p: int, m: int, lookahead: int, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, p - 1))
    program = one_f_one_b(stage, p, range(m), lookahead)
    assert [i.microbatch for i in program if isinstance(i, Forward)] == list(range(m))
    assert [i.microbatch for i in program if isinstance(i, Backward)] == list(range(m))
    held = most = 0
    for instruction in program:
        held += 1 if isinstance(instruction, Forward) else -1
        most = max(most, held)
        assert held >= 0
    assert most == min(m, p - stage + lookahead * (p - 1 - stage))


@given(stages, microbatches, lookaheads)
def test_no_stage_waits_for_ever(p: int, m: int, lookahead: int) -> None:
    """Fill, work and drain, however fast the network is: as long as it takes without any waiting."""
    assert _makespan(p, m, lookahead, forward=1, backward=2, way=0) == 3 * (m + p - 1)


def _source(instruction: Forward | Backward, stage: int, stages: int) -> tuple[type, int, int] | None:
    if isinstance(instruction, Forward):
        return (Forward, stage - 1, instruction.microbatch) if stage > 0 else None
    return (Backward, stage + 1, instruction.microbatch) if stage < stages - 1 else None


@pytest.mark.parametrize(("lookahead", "expected"), [(0, 11 * 30 + 16 * 5), (1, 11 * 30 + 6 * 5)])
def test_one_microbatch_ahead_hides_the_way_to_the_neighbour(lookahead: int, expected: int) -> None:
    """4 stages, 8 microbatches, forward 10, backward 20, way 5: only the fill and the drain still wait for the way."""
    assert _makespan(4, 8, lookahead, forward=10, backward=20, way=5) == expected


def _makespan(p: int, m: int, lookahead: int, *, forward: int, backward: int, way: int) -> int:
    programs = [one_f_one_b(s, p, range(m), lookahead) for s in range(p)]
    ends: dict[tuple[type, int, int], int] = {}
    free = [0] * p
    for _ in range(2 * p * m):  # each round does something, or there is a deadlock
        for s, program in enumerate(programs):
            while program:
                source = _source(program[0], s, p)
                if source is not None and source not in ends:
                    break
                instruction = program.pop(0)
                begin = max(free[s], ends[source] + way if source is not None else 0)
                free[s] = begin + (forward if isinstance(instruction, Forward) else backward)
                ends[type(instruction), s, instruction.microbatch] = free[s]
    assert not any(programs), "a deadlock"
    return max(free)


@given(stages, microbatches, lookaheads)
def test_the_simulator_waits_for_what_the_engine_waits_for(p: int, m: int, lookahead: int) -> None:
    layout = make_layout(0, m, 1, None)
    for stage in range(p):
        for instruction in one_f_one_b(stage, p, range(m), lookahead):
            frames = needs(instruction, Cell(0, stage), p, layout, 0, ())
            expected = [(address.kind is FrameKind.ACTIVATION, address.microbatch) for address in frames]
            frame = awaited(instruction, stage, p)
            assert expected == ([] if frame is None else [frame])
