"""Spot checks: the steps in which stages are checked, and the workers that recompute their microbatches."""

from itertools import pairwise

import pytest

from bamboo_core.planning.plan import Assignment, Cell, Layout, Peer, Plan
from bamboo_core.planning.spot_checks import EARLY, SpotSchedule, checker


def layout(pipelines: int, microbatches: int) -> Layout:
    split = tuple(tuple(range(d * microbatches, (d + 1) * microbatches)) for d in range(pipelines))
    return Layout(generation=0, split=split, bounds=tuple(d * microbatches for d in range(pipelines + 1)))


def plan(*pipelines: list[tuple[str, ...]]) -> Plan:
    """Return a plan. pipelines: the holders of each cell, the owner first."""
    rows = tuple(tuple(Assignment(owner=h[0], replicas=h[1:]) for h in row) for row in pipelines)
    workers = tuple(Peer(worker=w, host="h", port=1) for w in sorted({w for row in pipelines for h in row for w in h}))
    stages = tuple((s, s + 1) for s in range(len(pipelines[0])))
    given = (layout(len(pipelines), 2),)
    return Plan(epoch=1, stages=stages, pipelines=rows, layouts=given, workers=workers)


@pytest.mark.parametrize(("stages", "pipelines"), [(1, 1), (1, 3), (2, 1), (4, 2), (7, 1)])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8, 64])
def test_each_stage_is_checked_within_the_interval_and_no_more_often(stages, pipelines, microbatches) -> None:
    given, schedule = layout(pipelines, microbatches), SpotSchedule()
    cells = [Cell(d, s) for d in range(pipelines) for s in range(stages)]
    interval = schedule.interval(given)
    checked = [
        (step, cell) for step in range(40 * interval) for cell in cells if schedule.checks(cell, stages, given, step)
    ]
    for stage in range(stages):
        steps = [step for step, cell in checked if cell.stage == stage]
        assert tuple(steps[: len(EARLY)]) == EARLY
        assert steps[len(EARLY)] <= max(EARLY) + interval
        late = steps[len(EARLY) :]
        assert {b - a for a, b in pairwise(late)} == {interval}
        assert {step % 10 for step in late} == set(range(10)), "what happens in every tenth call is never met"
        assert {cell.pipeline for _, cell in checked if cell.stage == stage} == set(range(pipelines))


@pytest.mark.parametrize("microbatches", range(1, 100))
def test_the_price_is_below_half_a_percent_of_the_work(microbatches) -> None:
    assert 1 / (SpotSchedule().interval(layout(1, microbatches)) * microbatches) <= 1 / 250


def test_the_shadow_computes_it_again_or_a_holder_that_runs_nothing() -> None:
    assert checker(plan([("a", "b"), ("b", "a")]), Cell(0, 0)) == "b"
    assert checker(plan([("a", "b", "spare"), ("b", "a")]), Cell(0, 0)) == "spare"


def test_without_a_replica_another_pipeline_does_it_or_the_owner() -> None:
    two = plan([("a",), ("b",)], [("c",), ("d",)])
    assert [checker(two, cell) for cell in two.cells()] == ["c", "d", "a", "b"]
    assert checker(plan([("a",), ("b",)]), Cell(0, 1)) == "b"
