"""Transitions: the next plan after a loss, a notice, new workers or another target."""

from dataclasses import replace

import msgspec
import pytest

import replica_kit
from bamboo_core.job.spec import PipelineSchedule, RedundancyMode, RedundancySpec
from bamboo_core.planning.desired import PlanningView, Urgency, owners_of_new_rows, replacement_owners
from bamboo_core.planning.grid import initial_plan
from bamboo_core.planning.plan import Assignment, Cell, Peer, Plan, plan_problems
from bamboo_core.planning.transitions import StageLost, drain, drop_old_layouts, improve, resize, switch_mode, takeover
from replica_kit import TRAINING, copies, planned, view


def owners(plan: Plan) -> dict[Cell, str]:
    return {cell: plan.at(cell).owner for cell in plan.cells()}


def settled(found: PlanningView) -> PlanningView:
    """Improve a plan until no improvement is left, with all replicas in step after each one. Return the last view."""
    for _ in range(20):
        after = improve(found)
        if after is None:
            return found
        assert plan_problems(after) == []
        assert after.epoch == found.plan.epoch + 1
        level = frozenset((c, w) for c in after.cells() for w in after.at(c).replicas)
        found = replace(found, plan=after, synced=level)
    raise AssertionError("the plan changes for ever")


def test_a_stage_that_nobody_holds_in_step_is_lost() -> None:
    plan = planned(3, 1, 1, "a")
    dead = plan.at(Cell(0, 1)).owner
    assert takeover(view(plan, dead={dead}, synced=False)) == StageLost((Cell(0, 1),))
    other = next(w for w in sorted(plan.worker_ids()) if w not in plan.at(Cell(0, 1)).holders)
    after = takeover(view(plan, dead={dead}, synced=False, reported={1: (other,)}))
    assert isinstance(after, Plan)
    assert after.at(Cell(0, 1)).owner == other, "it says that it has it"


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


@pytest.mark.parametrize(
    ("stages", "pipelines", "spare", "held"), [(2, 1, 1, 2), (2, 1, 0, 1), (1, 3, 0, 2), (1, 2, 1, 2)]
)
def test_spare_workers_hold_what_too_short_a_ring_cannot(stages: int, pipelines: int, spare: int, held: int) -> None:
    """If a ring is too short for two replicas, spare workers hold them. held: losses that a cell's state survives."""
    seen = view(planned(stages, pipelines, 2, "a"), more=spare, redundancy=RedundancySpec(replicas=2).on(pipelines))
    final = settled(seen)
    assert {copies(final.plan, final.synced, cell) for cell in final.plan.cells()} == {held}


def test_no_spare_worker_keeps_replicas_that_others_keep() -> None:
    assert "n0" not in settled(view(planned(3, 1, 1, "ab"), more=1)).plan.holders()


def test_another_mode_begins_with_the_next_step() -> None:
    plan = planned(2, 1, 1, "a")
    assert switch_mode(view(plan)) is None
    after = switch_mode(view(plan, redundancy=RedundancySpec(mode=RedundancyMode.NONE)))
    assert after is not None
    assert (after.mode, after.boundary, owners(after)) == (RedundancyMode.NONE, True, owners(plan))


def placed(**where: str) -> dict[str, Peer]:
    return {worker: Peer(worker=worker, host="h", port=1, node=node) for worker, node in where.items()}


def four_stages(*replicas: tuple[str, ...]) -> Plan:
    """Return a plan of w0 to w3, on nodes a and b in turn. replicas: of each stage; default: the previous owner."""
    peers = placed(w0="a", w1="b", w2="a", w3="b")
    plan = initial_plan(list(peers.values()), tuple((s, s + 1) for s in range(4)), 1, TRAINING, RedundancySpec())
    held = replicas or tuple((f"w{(s - 1) % 4}",) for s in range(4))
    row = tuple(Assignment(owner=f"w{s}", replicas=held[s]) for s in range(4))
    return msgspec.structs.replace(plan, pipelines=(row,), workers=tuple(peers.values()))


def looking(plan: Plan, live: dict[str, Peer], leaving: dict[str, Urgency] | None = None) -> PlanningView:
    """Return the planner's view of a plan and its live workers, with all replicas in step."""
    plan = msgspec.structs.replace(plan, workers=tuple({**{p.worker: p for p in plan.workers}, **live}.values()))
    return view(plan, live=live, leaving=leaving or {})


def test_who_heals_a_pipeline_is_on_another_node_than_the_owners_around() -> None:
    """To replace w0, the planner gives y a replica, not x, which shares a node with the neighbours w1 and w3."""
    row = (Assignment(owner="w3", replicas=("w2",)), *four_stages().pipelines[0][1:])
    plan = msgspec.structs.replace(four_stages(), pipelines=(row,))
    live = placed(w1="b", w2="a", w3="b", x="b", y="c")
    healed = improve(looking(plan, live))
    assert healed is not None
    assert {"x", "y"} & set(healed.at(Cell(0, 0)).replicas) == {"y"}


def test_the_heir_of_a_lost_or_leaving_worker_is_on_another_node_than_it_if_there_is_one() -> None:
    plan = four_stages(("w2", "w3"), ("w0",), ("w1",), ("w2",))
    after = takeover(looking(plan, placed(w1="b", w2="a", w3="b")))
    assert isinstance(after, Plan)
    assert after.at(Cell(0, 0)).owner == "w3"
    here = placed(w0="a", w1="b", w2="a", w3="b")
    left = drain(looking(plan, here, {"w0": Urgency.NOW}))
    assert left is not None
    assert left.at(Cell(0, 0)).owner == "w3"
    both = dict.fromkeys(("w0", "w3"), Urgency.NOW)
    left = drain(looking(four_stages(("w3", "w1"), ("w0",), ("w1",), ("w2",)), here, both))
    assert left is not None
    assert left.at(Cell(0, 0)).owner == "w1", "who leaves, too, is no heir"
    without_spare = replacement_owners(looking(four_stages(), here, dict.fromkeys(("w0", "w1"), Urgency.NONE)))
    assert without_spare == {Cell(0, 0): "w3", Cell(0, 1): "w3"}


def test_an_idle_copy_of_another_pipeline_inherits_before_an_owner_there() -> None:
    plan = planned(1, 2, 1, "a")
    rows = ((Assignment(owner="w0", replicas=("n0",)),), (Assignment(owner="w1"),))
    after = takeover(view(msgspec.structs.replace(plan, pipelines=rows), dead={"w1"}, more=1))
    assert isinstance(after, Plan)
    assert after.at(Cell(1, 0)).owner == "n0"


def test_stages_whose_holders_are_all_on_one_node_get_a_replica_on_a_spare_one() -> None:
    """Two spare workers on other nodes replicate three stages held on one node; one alone replicates only two."""
    here = placed(w0="a", w1="a", w2="a")
    plan = initial_plan(list(here.values()), tuple((s, s + 1) for s in range(3)), 1, TRAINING, RedundancySpec())
    assert improve(looking(plan, here)) is None
    copied = improve(looking(plan, {**here, **placed(x="b")}))
    assert copied is not None
    assert [cell.stage for cell in copied.replicated_by("x")] == [0, 1]
    both = improve(looking(plan, {**here, **placed(x="b", y="c")}))
    assert both is not None
    assert [len({"x", "y"} & set(both.at(Cell(0, stage)).replicas)) for stage in range(3)] == [1, 1, 1]


def resizing(plan: Plan, pipelines: int, more: int = 0, filled: bool = True, leaving: str = "") -> PlanningView:
    """Return the planner's view of a plan whose job should have `pipelines` pipelines. filled: the future owners of new
    pipelines hold their stages in step. leaving: a worker under notice.
    """
    made = replica_kit.view(plan, more=more, pipelines=pipelines, leaving={leaving: Urgency.NONE} if leaving else {})
    synced = frozenset((Cell(0, cell.stage), worker) for cell, worker in owners_of_new_rows(made).items())
    return replace(made, synced=made.synced | synced) if filled else made


def test_nothing_changes_while_the_number_is_right_or_another_change_is_under_way() -> None:
    plan = planned(2, 2, 1, "ab")
    assert resize(resizing(plan, 2)) is None
    shrinking = resize(resizing(plan, 1))
    assert shrinking is not None
    assert resize(resizing(shrinking, 2)) is None


def test_another_schedule_begins_at_a_boundary_with_the_same_cells() -> None:
    plan = planned(2, 2, 1, "ab")
    assert plan.target.schedule is PipelineSchedule.ONE_F_ONE_B
    late = replace(resizing(plan, 2), schedule=PipelineSchedule.ZB_H1)
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


def test_a_job_grows_only_with_workers_that_hold_the_stages_already() -> None:
    plan = planned(2, 1, 1, "a")
    assert resize(resizing(plan, 2)) is None, "nobody has come"
    assert resize(resizing(plan, 2, more=2, filled=False)) is None
    grown = resize(resizing(plan, 2, more=2))
    assert grown is not None
    assert plan_problems(grown) == []
    assert (grown.boundary, grown.target.pipelines, len(grown.layouts)) == (True, 2, 2)
    assert {grown.at(Cell(1, s)).owner for s in range(2)} == {"n0", "n1"}
    assert {grown.at(Cell(0, s)).owner for s in range(2)} == {plan.at(Cell(0, s)).owner for s in range(2)}


def test_a_job_shrinks_at_a_boundary_and_who_loses_a_pipeline_becomes_a_replica() -> None:
    plan = planned(2, 2, 1, "ab")
    last = [plan.at(Cell(1, s)).owner for s in range(2)]
    smaller = resize(replace(resizing(plan, 1, leaving=last[1]), schedule=PipelineSchedule.ZB_H1))
    assert smaller is not None
    assert smaller.target.schedule is PipelineSchedule.ZB_H1
    assert plan_problems(smaller) == []
    assert (smaller.boundary, smaller.target.pipelines) == (True, 1)
    assert last[0] in smaller.at(Cell(0, 0)).holders
    assert last[1] not in smaller.at(Cell(0, 1)).replicas or last[1] in plan.at(Cell(0, 1)).replicas
