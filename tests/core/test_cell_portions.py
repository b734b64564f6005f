"""Portions: how several workers share the microbatches of a lost cell."""

from collections import Counter
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.job.spec import RedundancyMode, RedundancySpec
from bamboo_core.job.training_spec import TrainingSpec
from bamboo_core.planning.cell_portions import is_settled, keeper, ranges
from bamboo_core.planning.desired import Urgency
from bamboo_core.planning.grid import initial_plan
from bamboo_core.planning.plan import Assignment, Cell, Peer, Plan, Portion, plan_problems
from bamboo_core.planning.transitions import improve, takeover
from replica_kit import view

KEPT = RedundancySpec(mode=RedundancyMode.REPLICAS)


def planned(
    pipelines: int,
    *,
    microbatches: int = 16,
    stages: int = 1,
    groups: int | None = None,
    spare: int = 0,
    redundancy: RedundancySpec = KEPT,
) -> Plan:
    training = TrainingSpec(steps=1, global_batch_size=microbatches, micro_batch_size=1, gradient_groups=groups)
    peers = [Peer(worker=f"w{i}", host="h", port=1) for i in range(stages * pipelines + spare)]
    layers = tuple((s, s + 1) for s in range(stages))
    return initial_plan(peers, layers, pipelines, training, redundancy)


def after(plan: Plan, *dead: str, leaving: tuple[str, ...] = ()) -> Plan:
    found = takeover(view(plan, dead=dead, leaving=dict.fromkeys(leaving, Urgency.NONE)))
    assert isinstance(found, Plan)
    assert plan_problems(found) == []
    return found


def run_by(plan: Plan) -> dict[int, str]:
    """Return, for each microbatch of a step, the worker that runs its last stage."""
    found: dict[int, str] = {}
    for cell in plan.cells():
        assignment = plan.at(cell)
        if assignment.portions:
            for worker, (first, end) in ranges(plan.target, cell.pipeline, assignment.portions):
                found |= dict.fromkeys(range(first, end), worker)
        else:
            found |= dict.fromkeys(plan.target.split[cell.pipeline], assignment.owner)
    return found


@given(st.integers(2, 6), st.integers(6, 40), st.data())
def test_every_microbatch_has_somebody_and_nobody_has_much_more(
    pipelines: int, groups: int, data: st.DataObject
) -> None:
    """Each loss spreads the lost worker's microbatches evenly over the others, which keep their own."""
    plan = planned(pipelines, microbatches=groups, groups=groups)
    order = data.draw(st.permutations(sorted(plan.worker_ids())))
    for dead in order[:-1]:
        before = run_by(plan)
        plan = after(plan, dead)
        now = run_by(plan)
        assert sorted(now) == list(range(groups))
        assert all(now[m] == worker for m, worker in before.items() if worker != dead)
        load = Counter(now.values())
        assert load.keys() == plan.worker_ids()
        assert max(load.values()) - min(load.values()) <= 1


def test_a_worker_that_has_a_pipeline_of_its_own_again_runs_all_of_it() -> None:
    plan = after(planned(3, spare=1), "w0")
    filling = improve(view(plan, dead={"w0"}))
    assert filling is not None
    assert filling.reason == "Replicating"
    assert filling.at(Cell(0, 0)).portions == plan.at(Cell(0, 0)).portions
    healed = improve(view(filling, dead={"w0"}))
    assert healed is not None
    assert healed.reason == "Healed"
    assert not any(healed.at(c).portions for c in healed.cells())


def test_a_replica_that_takes_over_is_helped_for_the_rest_of_the_step() -> None:
    plan = planned(2, spare=1)
    rows = tuple(
        tuple(msgspec.structs.replace(a, replicas=("w2",)) if a.owner == "w0" else a for a in row)
        for row in plan.pipelines
    )
    plan = after(msgspec.structs.replace(plan, pipelines=rows), "w0")
    assert plan.at(Cell(0, 0)).owner == "w2"
    assert Counter(run_by(plan).values()) == {"w1": 8, "w2": 8}


def test_portions_of_the_loss_end_with_the_step_if_every_worker_has_a_pipeline() -> None:
    plan = planned(2, spare=1)
    mine = Assignment(owner="w0", portions=(Portion(worker="w0", first=0, end=4), Portion(worker="w1", first=4, end=8)))
    plan = msgspec.structs.replace(plan, pipelines=((mine,), plan.pipelines[1]))
    assert not is_settled(plan)
    settled = improve(view(plan))
    assert settled is not None
    assert (settled.reason, settled.boundary, is_settled(settled)) == ("Settled", True, True)


def test_who_leaves_is_given_nothing_more() -> None:
    plan = after(planned(4), "w0", leaving=("w2",))
    assert "w2" not in {p.worker for p in plan.at(Cell(0, 0)).portions}


def test_the_owners_of_the_same_stage_and_the_new_owner_share_a_lost_cell() -> None:
    plan = planned(3, stages=2)
    before, cell = plan.at(Cell(1, 1)), Cell(1, 1)
    shared = after(plan, before.owner).at(cell)
    assert {p.worker for p in shared.portions} == {before.shadow, plan.at(Cell(0, 1)).owner, plan.at(Cell(2, 1)).owner}
    assert [a for row in after(plan, before.owner).pipelines for a in row if a.portions] == [shared]


@pytest.mark.parametrize(("replicas", "stage"), [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_an_only_runner_goes_on_behind_what_it_keeps(replicas: int, stage: int) -> None:
    plan = planned(1, stages=3, redundancy=replace(KEPT, replicas=replicas))
    lost, heir = plan.at(Cell(0, stage)).owner, plan.at(Cell(0, stage)).shadow
    assert heir is not None
    taken = after(plan, lost).at(Cell(0, stage))
    assert taken.owner == heir
    assert [p.worker for p in taken.portions] == [heir]
    alone = planned(1, stages=3, groups=1, redundancy=replace(KEPT, replicas=replicas))
    assert not after(alone, lost).at(Cell(0, stage)).portions


@given(st.integers(2, 4), st.integers(2, 8), st.floats(0.0, 1.0, exclude_max=True))
def test_what_the_new_owner_keeps_is_no_load(pipelines: int, groups: int, elapsed: float) -> None:
    plan = planned(pipelines, stages=2, microbatches=pipelines * groups, groups=pipelines * groups)
    cell, kept = Cell(0, 1), max(0, int(elapsed * groups) - 1)
    found = takeover(view(plan, dead={plan.at(cell).owner}, elapsed=elapsed))
    assert isinstance(found, Plan)
    load = Counter(run_by(found)[m] for m in range(groups))
    load[found.at(cell).owner] -= kept
    assert load.total() == groups - kept
    assert max(load.values()) <= -(-(groups - kept) // pipelines)
    first = found.at(cell).portions[0]
    assert (first.worker, first.end >= kept) == (found.at(cell).owner, True)


def test_nobody_keeps_sums_of_a_stage_that_nobody_else_could_continue() -> None:
    none = RedundancySpec(mode=RedundancyMode.NONE)
    assert keeper(planned(1, stages=3, redundancy=none), Cell(0, 1)) is None
    for plan in (planned(1, stages=3), planned(2, stages=3, redundancy=none)):
        assert keeper(plan, Cell(0, 1)) == plan.at(Cell(0, 0)).owner


def test_no_group_is_shared() -> None:
    assert not any(a.portions for row in after(planned(3, groups=3), "w0").pipelines for a in row)
