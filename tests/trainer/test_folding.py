"""What workers with several devices say and hear: of stages to the coordinator, of device stages to the engine."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.control.digests import add_digests
from bamboo_core.control.guard import StateSums
from bamboo_core.control.protocol import CellFinished, LeftBehind, Message, PlanApplied, Report, TakenOver
from bamboo_core.planning.plan import Cell
from bamboo_core.planning.shares import share
from bamboo_core.planning.splits.stage_times import StageTimes
from bamboo_trainer.engine.folding import Folding

STAGES = ((0, 2), (2, 3), (3, 7), (7, 8))  # of two workers with two devices each


def taken(stage: int, epoch: int = 5, step: int = 7, milliseconds: float = 1.0, forwards: int = 4) -> TakenOver:
    return TakenOver(
        epoch=epoch,
        cell=Cell(1, stage),
        step=step,
        reform_ms=1.0,
        recompute_ms=milliseconds,
        forwards=forwards,
        backwards=2,
    )


def finished(stage: int, digest: int) -> CellFinished:
    return CellFinished(cell=Cell(0, stage), digest=f"{digest:064x}")


def state_sums(stage: int, version: int, **found: int) -> StateSums:
    return StateSums(stage=stage, version=version, sums={name: f"{number:016x}" for name, number in found.items()})


def folded(folding: Folding, *messages: Message) -> list[Message | None]:
    return [folding.fold(message) for message in messages]


def test_a_stage_is_held_at_the_oldest_version_of_its_parts_and_not_without_one_of_them() -> None:
    said = Folding(2).fold(Report(committed=8, held={0: 9, 1: 8, 3: 9, 4: 2, 5: 3}))
    assert said == Report(committed=8, held={0: 8, 2: 2})


def test_a_cell_is_taken_over_when_its_last_part_is() -> None:
    late = taken(2, epoch=6, step=8, milliseconds=9.0, forwards=3)
    first, second = folded(Folding(2), taken(3), late)
    assert first is None
    assert second == msgspec.structs.replace(late, cell=Cell(1, 1), forwards=4)


def test_what_one_part_said_counts_no_more_once_the_cell_is_given_away() -> None:
    folding = Folding(2)
    assert folding.fold(taken(3)) is None
    folding.keep([Cell(1, 0), Cell(1, 1)], [0, 1])
    assert folded(folding, taken(2), taken(3))[0] is None


def test_a_finished_cell_has_the_digest_of_all_its_parts_and_says_so_again() -> None:
    folding = Folding(3)
    parts = [finished(3 + device, 2**255 + device) for device in range(3)]
    assert folded(folding, *parts[:2]) == [None, None]
    whole = CellFinished(cell=Cell(0, 1), digest=add_digests(part.digest for part in parts))
    assert folding.fold(parts[2]) == whole
    assert folding.fold(parts[0]) == whole, "a report"
    folding.forget()
    assert folding.fold(parts[1]) is None


def test_sums_of_a_state_are_told_of_a_version_that_all_parts_have_come_to() -> None:
    folding = Folding(2)
    assert folded(folding, state_sums(2, 4, a=1), state_sums(2, 8, a=2), state_sums(0, 8, a=7)) == [None, None, None]
    assert folding.fold(state_sums(3, 8, b=5)) == state_sums(1, 8, a=2, b=5)
    assert folding.fold(state_sums(2, 8, a=2)) == state_sums(1, 8, a=2, b=5), "a report"
    folding.keep([], [0, 1])
    assert folding.fold(state_sums(3, 8, b=5)) is None


def test_what_is_about_no_stage_passes_as_it_is_and_a_cell_is_left_behind_as_a_whole() -> None:
    applied = PlanApplied(epoch=3)
    assert Folding(2).fold(applied) is applied
    assert Folding(2).fold(LeftBehind(cell=Cell(1, 5))) == LeftBehind(cell=Cell(1, 2))


@given(st.lists(st.lists(st.sampled_from("abcd"), unique=True).map(tuple), min_size=2, max_size=2))
def test_everybody_writes_the_layers_that_the_coordinator_has_dealt(writers: list[tuple[str, ...]]) -> None:
    """So it knows, if a worker is lost, which layers nobody writes any more."""
    unfolded = Folding(2).unfolded_writers(tuple(writers), STAGES)
    for worker in "abcd":
        dealt = [share(mine, worker, layers) for mine, layers in zip(writers, ((0, 3), (3, 8)), strict=True)]
        mine = [share(part, worker, layers) for part, layers in zip(unfolded, STAGES, strict=True)]
        assert [layer for part in mine for layer in part] == [layer for part in dealt for layer in part]


def test_times_are_those_of_a_stage_once_each_part_has_been_measured() -> None:
    folding = Folding(2)
    parts = [
        StageTimes(layers=(0, 2), forward=1.0, backward=2.0, each=(0.5, 0.25), microbatches=9),
        StageTimes(layers=(2, 3), forward=4.0, backward=8.0, each=(4.0,), microbatches=7),
    ]
    whole = StageTimes(layers=(0, 3), forward=5.0, backward=10.0, each=(0.5, 0.25, 4.0), microbatches=7)
    assert folding.times(parts, STAGES) == (whole,)
    assert folding.times(parts[:1], STAGES) == ()
    in_advance = [StageTimes(layers=(3, 7), each=(1.0,) * 4), StageTimes(layers=(7, 8))]
    assert folding.times(in_advance, STAGES) == (StageTimes(layers=(3, 8)),)
