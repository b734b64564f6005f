"""Heirs: the workers that take over stages whose workers are lost at the same time."""

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.planning.heirs import heirs_may_differ, heirs_of, lost_runs
from bamboo_core.planning.plan import Assignment, Cell, Plan, plan_problems
from replica_kit import adjacent_heirs_differ, after_loss, planned


@given(st.integers(1, 7), st.integers(2, 3), st.text("abcd", min_size=3, max_size=7))
def test_plans_in_which_heirs_may_differ_are_known(stages: int, replicas: int, zones: str) -> None:
    plan = planned(stages, 1, replicas, zones)
    dead = itertools.combinations(sorted(plan.worker_ids()), min(replicas, stages - 1))
    after = [after_loss(plan, set(workers)) for workers in dead if workers]
    if any(adjacent_heirs_differ(plan, one) for one in after):
        assert heirs_may_differ(plan)


def test_a_plan_in_which_heirs_differ() -> None:
    """`heirs_may_differ` is true of a plan in which w3 and w2 would get stages 0 and 1 if w0 and w1 were lost."""
    plan = planned(4, 1, 2, "a")
    assert not heirs_may_differ(plan)
    row = plan.pipelines[0]
    owners = [a.owner for a in row]
    wrong = (
        Assignment(owner=owners[0], replicas=(owners[3], owners[1])),
        Assignment(owner=owners[1], replicas=(owners[0], owners[2])),
        *row[2:],
    )
    broken = replace_row(plan, wrong)
    assert plan_problems(broken) == []
    assert heirs_may_differ(broken)
    after = after_loss(broken, {owners[0], owners[1]})
    assert adjacent_heirs_differ(broken, after)


def replace_row(plan: Plan, row: tuple[Assignment, ...]) -> Plan:
    return msgspec.structs.replace(plan, pipelines=(row,))


def test_one_heir_is_found_for_all_that_are_next_to_each_other() -> None:
    plan = planned(6, 1, 2, "a")
    lost = [Cell(0, s) for s in (0, 5, 2)]
    assert sorted(map(tuple, (map(tuple, run) for run in lost_runs(plan, lost)))) == [
        ((0, 2),),
        ((0, 5), (0, 0)),
    ]
    every = [Cell(0, s) for s in range(6)]
    assert [len(run) for run in lost_runs(plan, every)] == [6]
    names = {Cell(0, 5): ["a", "b"], Cell(0, 0): ["b", "c"]}
    assert heirs_of([Cell(0, 5), Cell(0, 0)], names.__getitem__) == ["b", "b"]
    apart: dict[Cell, list[str]] = {Cell(0, 5): ["a"], Cell(0, 0): []}
    assert heirs_of([Cell(0, 5), Cell(0, 0)], apart.__getitem__) == ["a", None]
