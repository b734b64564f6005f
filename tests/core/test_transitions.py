"""From the plan in force to the next one: whatever is lost, leaves or comes, it is sound and reaches its target."""

from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.job.spec import RedundancyMode, RedundancySpec
from bamboo_core.planning.desired import PlanningView, Urgency
from bamboo_core.planning.plan import Cell, Peer, Plan, plan_problems
from bamboo_core.planning.transitions import StageLost, drain, improve, switch_mode, takeover
from replica_kit import copies, planned


def view(
    plan: Plan, *, dead: Collection[str] = (), more: int = 0, synced: bool = True, **given: object
) -> PlanningView:
    """more: workers that stand by. synced: all replicas are in step."""
    live = {p.worker: p for p in plan.workers if p.worker not in dead}
    live |= {f"n{i}": Peer(worker=f"n{i}", host="h", port=1) for i in range(more)}
    level = frozenset((c, w) for c in plan.cells() for w in plan.at(c).replicas) if synced else frozenset()
    known: dict[str, object] = {"leaving": {}, "redundancy": RedundancySpec().on(1), "pipelines": len(plan.pipelines)}
    return PlanningView(plan=plan, live=live, synced=level, generation=plan.target.generation, **{**known, **given})  # type: ignore[arg-type]


def owners(plan: Plan) -> dict[Cell, str]:
    return {cell: plan.at(cell).owner for cell in plan.cells()}


def settled(found: PlanningView) -> PlanningView:
    """After all improvements, each with its replicas filled; bounded, since each has to get on."""
    for _ in range(20):
        after = improve(found)
        if after is None:
            return found
        assert plan_problems(after) == []
        assert after.epoch == found.plan.epoch + 1
        level = frozenset((c, w) for c in after.cells() for w in after.at(c).replicas)
        found = replace(found, plan=after, synced=level)
    raise AssertionError("the plan changes for ever")


def test_nothing_is_taken_over_while_nobody_is_lost() -> None:
    assert takeover(view(planned(3, 2, 1, "ab"))) is None


def test_a_stage_that_nobody_holds_in_step_is_lost() -> None:
    plan = planned(3, 1, 1, "a")
    dead = plan.at(Cell(0, 1)).owner
    assert takeover(view(plan, dead={dead}, synced=False)) == StageLost((Cell(0, 1),))
    other = next(w for w in sorted(plan.worker_ids()) if w not in plan.at(Cell(0, 1)).holders)
    after = takeover(view(plan, dead={dead}, synced=False, reported={1: (other,)}))
    assert isinstance(after, Plan)
    assert after.at(Cell(0, 1)).owner == other, "it says that it has it"


def test_copies_are_those_that_one_may_count_on() -> None:
    plan = planned(2, 2, 1, "ab")
    level = view(plan).synced
    assert [copies(plan, level, c) for c in plan.cells()] == [2, 2, 2, 2]
    assert [copies(plan, frozenset(), c) for c in plan.cells()] == [1, 1, 1, 1], "the other pipeline's owner"
    alone = planned(2, 1, 1, "a")
    assert copies(alone, frozenset(), Cell(0, 0)) == 0
    assert copies(alone, view(alone).synced, Cell(0, 0)) > 0


@given(st.integers(2, 4), st.data())
def test_a_standby_heals_the_pipeline_in_the_end(stages: int, data: st.DataObject) -> None:
    plan = planned(stages, 1, 1, "ab")
    dead = data.draw(st.sampled_from(sorted(plan.worker_ids())))
    after = takeover(view(plan, dead={dead}, more=1))
    assert isinstance(after, Plan)
    final = settled(replace(view(after, more=1)))
    assert improve(final) is None
    assert len(set(owners(final.plan).values())) == stages, "nobody runs two stages any more"
    assert all(copies(final.plan, final.synced, cell) > 0 for cell in final.plan.cells())
    assert "n0" in owners(final.plan).values()


@pytest.mark.parametrize(("urgency", "boundary"), [(Urgency.SOON, True), (Urgency.NOW, False)])
def test_who_leaves_hands_over_at_a_boundary_if_there_is_time(urgency: Urgency, boundary: bool) -> None:
    plan = planned(3, 1, 1, "a")
    worker = plan.at(Cell(0, 2)).owner
    after = drain(view(plan, leaving={worker: urgency}))
    assert after is not None
    assert plan_problems(after) == []
    assert (after.boundary, after.reason) == (boundary, "PlannedTakeover")
    assert after.at(Cell(0, 2)).owner == plan.at(Cell(0, 2)).shadow
    assert worker in after.at(Cell(0, 2)).replicas, "it holds the state until it goes"


def test_with_time_it_waits_for_a_spare_worker_to_be_filled() -> None:
    plan = planned(3, 1, 1, "a")
    worker = plan.at(Cell(0, 2)).owner
    waiting = view(plan, leaving={worker: Urgency.NONE}, more=1)
    assert drain(waiting) is None
    filling = improve(waiting)
    assert filling is not None
    assert "n0" in filling.at(Cell(0, 2)).replicas
    ready = replace(waiting, plan=filling, synced=waiting.synced | {(Cell(0, 2), "n0")})
    after = drain(ready)
    assert after is not None
    assert after.at(Cell(0, 2)).owner == "n0"


def test_no_spare_worker_keeps_replicas_that_others_keep() -> None:
    assert "n0" not in settled(view(planned(3, 1, 1, "ab"), more=1)).plan.holders()


def test_another_mode_begins_with_the_next_step() -> None:
    plan = planned(2, 1, 1, "a")
    assert switch_mode(view(plan)) is None
    after = switch_mode(view(plan, redundancy=RedundancySpec(mode=RedundancyMode.NONE)))
    assert after is not None
    assert (after.mode, after.boundary, owners(after)) == (RedundancyMode.NONE, True, owners(plan))
