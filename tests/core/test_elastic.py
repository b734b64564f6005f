"""How many pipelines the job runs, and what has to be in place before it runs another number."""

from dataclasses import replace

import replica_kit
from bamboo_core.job.spec import PipelineSchedule
from bamboo_core.planning.desired import PlanningView, Urgency, owners_of_new_rows
from bamboo_core.planning.elastic import drop_old_layouts, resize
from bamboo_core.planning.plan import Cell, Plan, plan_problems
from replica_kit import planned


def view(plan: Plan, pipelines: int, more: int = 0, filled: bool = True, leaving: str = "") -> PlanningView:
    """filled: are the workers that stand by, and that the plan has made replicas, in step?"""
    made = replica_kit.view(plan, more=more, pipelines=pipelines, leaving={leaving: Urgency.NONE} if leaving else {})
    synced = frozenset((Cell(0, cell.stage), worker) for cell, worker in owners_of_new_rows(made).items())
    return replace(made, synced=made.synced | synced) if filled else made


def test_nothing_changes_while_the_number_is_right_or_another_change_is_under_way() -> None:
    plan = planned(2, 2, 1, "ab")
    assert resize(view(plan, 2)) is None
    shrinking = resize(view(plan, 1))
    assert shrinking is not None
    assert resize(view(shrinking, 2)) is None


def test_another_schedule_begins_at_a_boundary_with_the_same_cells() -> None:
    plan = planned(2, 2, 1, "ab")
    assert plan.target.schedule is PipelineSchedule.ONE_F_ONE_B
    late = replace(view(plan, 2), schedule=PipelineSchedule.ZB_H1)
    changed = resize(late)
    assert changed is not None
    assert plan_problems(changed) == []
    assert (changed.boundary, changed.reason, changed.pipelines) == (True, "ScheduleChanged", plan.pipelines)
    assert [layout.schedule for layout in changed.layouts] == ["1F1B", "ZBH1"]
    assert changed.target.split == plan.target.split
    assert resize(replace(late, plan=changed)) is None
    settled = drop_old_layouts(replace(late, plan=changed, generation=changed.target.generation))
    assert settled is not None
    assert settled.message == "the job runs 2 pipelines by schedule ZBH1"


def test_a_resize_takes_the_schedule_along() -> None:
    plan = planned(2, 2, 1, "ab")
    shrinking = resize(replace(view(plan, 1), schedule=PipelineSchedule.ZB_H1))
    assert shrinking is not None
    assert (shrinking.target.pipelines, shrinking.target.schedule) == (1, PipelineSchedule.ZB_H1)


def test_a_job_grows_only_with_workers_that_hold_the_stages_already() -> None:
    plan = planned(2, 1, 1, "a")
    assert resize(view(plan, 2)) is None, "nobody has come"
    assert resize(view(plan, 2, more=2, filled=False)) is None
    grown = resize(view(plan, 2, more=2))
    assert grown is not None
    assert plan_problems(grown) == []
    assert (grown.boundary, grown.target.pipelines, len(grown.layouts)) == (True, 2, 2)
    assert {grown.at(Cell(1, s)).owner for s in range(2)} == {"n0", "n1"}
    assert {grown.at(Cell(0, s)).owner for s in range(2)} == {plan.at(Cell(0, s)).owner for s in range(2)}


def test_a_job_shrinks_at_a_boundary_and_who_loses_a_pipeline_becomes_a_replica() -> None:
    plan = planned(2, 2, 1, "ab")
    last = [plan.at(Cell(1, s)).owner for s in range(2)]
    smaller = resize(view(plan, 1, leaving=last[1]))
    assert smaller is not None
    assert plan_problems(smaller) == []
    assert (smaller.boundary, smaller.target.pipelines) == (True, 1)
    assert last[0] in smaller.at(Cell(0, 0)).holders
    assert last[1] not in smaller.at(Cell(0, 1)).replicas or last[1] in plan.at(Cell(0, 1)).replicas


def test_old_rows_go_once_a_step_is_committed_in_the_new_layout() -> None:
    shrinking = resize(view(planned(2, 2, 1, "ab"), 1))
    assert shrinking is not None
    new = view(shrinking, 1)
    assert drop_old_layouts(replace(new, generation=shrinking.layouts[0].generation)) is None
    dropped = drop_old_layouts(new)
    assert dropped is not None
    assert (len(dropped.pipelines), dropped.layouts) == (1, (shrinking.target,))
    assert drop_old_layouts(view(dropped, 1)) is None
