"""Sums of finished groups: which are kept, and when one is sent."""

import pytest

from bamboo_core.planning.plan import Cell
from bamboo_trainer.engine.steps.kept_sums import KeptSums, Pace
from bamboo_trainer.frames.frame import Address, Frame, FrameKind

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
