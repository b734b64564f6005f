"""The number of steps between checkpoints if the manifest does not set it."""

from dataclasses import replace

import pytest

from bamboo_core.coordinator.checkpointing.intervals import best_seconds, has_copies, interval, seconds_between_losses
from bamboo_core.coordinator.checkpointing.saving import next_one
from bamboo_core.coordinator.events import CheckpointCounts, RestoreCause
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.job.spec import CheckpointSpec
from checkpoint_world import made


def free(state: CoordinatorState, *seconds: float) -> CoordinatorState:
    """Return the state of a job without a checkpoint interval in its manifest. seconds: how long recent steps took."""
    assert state.spec.checkpoint is not None
    spec = replace(state.spec, checkpoint=replace(state.spec.checkpoint, every_steps=None))
    return replace(state, progress=replace(state.progress, step_seconds=seconds), terms=replace(state.terms, spec=spec))


def steps(state: CoordinatorState) -> int:
    spec = state.spec.checkpoint
    assert isinstance(spec, CheckpointSpec)
    return interval(state, spec)


def history(*, saved: int = 0, seconds: float = 0.0, stall: float = 0.0, fatal: int = 0) -> CheckpointCounts:
    counts = CheckpointCounts(restores={RestoreCause.STAGE_LOST: fatal, RestoreCause.RESULTS_DIFFER: 9})
    for _ in range(saved):
        counts = counts.saved(seconds, stall)
    return counts


@pytest.mark.parametrize(
    ("cost", "writing", "between", "seconds"),
    [
        (1.0, 0.0, 1800.0, 60.0),
        (4.0, 10.0, 1800.0, 120.0),
        (1.0, 0.0, 100.0, 30.0),
        (1.0, 40.0, 1800.0, 160.0),
        (100.0, 0.0, 360_000.0, 600.0),
        (1.0, 400.0, 1800.0, 1600.0),
    ],
)
def test_cost_is_weighed_against_repeated_steps_within_bounds(
    cost: float, writing: float, between: float, seconds: float
) -> None:
    """The interval is between half a minute and ten minutes, unless writing would take over a quarter of the time."""
    assert best_seconds(cost, writing, between) == pytest.approx(seconds)


@pytest.mark.parametrize(("seconds", "expected"), [((), 200), ((0.01,), 200), ((10.0,), 16), ((900.0,), 1)])
def test_of_a_job_without_a_history_a_loss_in_four_hours_is_assumed(seconds: tuple[float, ...], expected: int) -> None:
    """Without a history, the coordinator assumes a loss in 4 h and 1 s per checkpoint: 170 s, but at most 200 steps."""
    assert steps(made().state) == 8, "as the manifest says"
    assert steps(free(made().state, *seconds)) == expected


def test_the_jobs_own_losses_and_checkpoints_count() -> None:
    state = free(made().state, 1.0)
    calm = replace(state, progress=replace(state.progress, trained=86_400))

    def known(counts: CheckpointCounts) -> CoordinatorState:
        return replace(calm, checkpoints=replace(calm.checkpoints, counts=counts))

    assert seconds_between_losses(calm, 1.0) == pytest.approx(100_800)
    assert seconds_between_losses(known(history(fatal=4)), 1.0) == pytest.approx(20_160), "those that went back"
    assert seconds_between_losses(known(replace(history(), repeated=10_000)), 1.0) == pytest.approx(110_800)
    often, rare = known(history(saved=3, seconds=4.0, fatal=40)), known(history(saved=3, seconds=4.0, fatal=400))
    assert (steps(often), steps(rare)) == (70, 30)
    assert steps(known(history(saved=3, seconds=4.0, stall=1.0, fatal=40))) == 99, "1 s, and a quarter of four"


def test_for_three_quarters_of_the_time_nothing_is_written_however_short_steps_are() -> None:
    state = free(made().state, 0.5)
    counts = history(saved=1, seconds=80.0, stall=0.1)
    assert steps(replace(state, checkpoints=replace(state.checkpoints, counts=counts))) == 640
    slow = history(saved=1, seconds=80.1, stall=0.1)
    assert steps(replace(state, checkpoints=replace(state.checkpoints, counts=slow))) == 641


def test_while_a_stage_has_one_holder_any_loss_may_make_the_job_go_back() -> None:
    state = replace(
        free(made().state, 1.0),
        progress=replace(free(made().state, 1.0).progress, trained=36_000),
        membership=replace(free(made().state, 1.0).membership, preemptions=35),
    )
    assert has_copies(state)
    bare = replace(state, plans=replace(state.plans, synced=frozenset()))
    assert not has_copies(bare)
    assert seconds_between_losses(bare, 1.0) == pytest.approx(1 / (1 / 50_400 + 36 / 39_600))
    assert (steps(state), steps(bare)) == (200, 46)
    kept = replace(bare, checkpoints=replace(bare.checkpoints, last_step=290))
    assert next_one(replace(kept, progress=replace(kept.progress, step=300))) == 290 + 46
    assert next_one(replace(bare, progress=replace(bare.progress, step=300))) == 301, (
        "at once, if the newest one is older than that"
    )


def test_pipelines_hold_each_others_stages() -> None:
    two = made(2, 2).state
    assert has_copies(replace(two, plans=replace(two.plans, synced=frozenset())))
    assert not has_copies(replace(two, plans=replace(two.plans, newest=None)))
