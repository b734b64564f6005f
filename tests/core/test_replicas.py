"""Several replicas of each stage: which losses they cover, who goes on with what, and what people are told of it."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo.coordinator.events import SpecChanged
from bamboo.coordinator.job_status import status
from bamboo.coordinator.protection import protection
from bamboo.job.manifest import parse_manifest
from bamboo.job.manifest_warnings import warnings
from bamboo.job.spec import RedundancySpec, TrainingSpec
from bamboo.planning.grid import initial_plan
from bamboo.planning.heirs import heirs_may_differ, heirs_of, lost_runs
from bamboo.planning.plan import Assignment, Cell, Peer, Plan, plan_problems
from bamboo.planning.transitions import PlanningView, copies, takeover
from manifest_kit import bamboojob, training
from operator_kit import job, said
from world import World

TRAINING = TrainingSpec(steps=1, global_batch_size=8, micro_batch_size=1)


def planned(stages: int, pipelines: int, replicas: int, zones: str) -> Plan:
    """With workers in these zones in turn."""
    peers = [Peer(worker=f"w{i}", host="h", port=1, zone=zones[i % len(zones)]) for i in range(stages * pipelines)]
    layers = tuple((s, s + 1) for s in range(stages))
    return initial_plan(peers, layers, pipelines, TRAINING, RedundancySpec(replicas=replicas))


def after_loss(plan: Plan, dead: set[str]) -> Any:
    """What follows when all of these are lost at once, with all replicas in step."""
    return takeover(
        PlanningView(
            plan=plan,
            live={p.worker: p for p in plan.workers if p.worker not in dead},
            leaving={},
            synced=frozenset((c, w) for c in plan.cells() for w in plan.at(c).replicas),
            redundancy=RedundancySpec(replicas=3),
            pipelines=len(plan.pipelines),
            generation=0,
        )
    )


def adjacent_heirs_differ(plan: Plan, after: Plan) -> bool:
    """Do two stages next to each other that were lost at once have two new owners?"""
    lost = [c for c in plan.cells() if after.at(c).owner != plan.at(c).owner]
    return any(len({after.at(c).owner for c in run}) > 1 for run in lost_runs(plan, lost))


grids = st.tuples(
    st.integers(1, 7), st.integers(1, 2), st.integers(1, 3), st.text("abcd", min_size=1, max_size=7).map("".join)
)


@given(grids)
def test_any_workers_may_be_lost_at_once_up_to_the_number_of_replicas(grid: tuple[int, int, int, str]) -> None:
    stages, pipelines, replicas, _ = grid
    plan = planned(*grid)
    assert plan_problems(plan) == []
    differ = heirs_may_differ(plan)
    least = min(replicas, stages - 1)
    for cell in plan.cells():
        assert len(plan.at(cell).replicas) == least
    load = Counter(w for c in plan.cells() for w in plan.at(c).replicas)
    assert not load or max(load.values()) <= least + (replicas > 1)
    for dead in map(set, itertools.combinations(sorted(plan.worker_ids()), least)):
        after = after_loss(plan, dead) if dead else plan
        assert isinstance(after, Plan), dead
        assert plan_problems(after) == []
        if pipelines == 1 and not differ:
            assert not adjacent_heirs_differ(plan, after), dead


@given(st.integers(1, 7), st.integers(2, 3), st.text("abcd", min_size=3, max_size=7))
def test_plans_in_which_heirs_may_differ_are_known(stages: int, replicas: int, zones: str) -> None:
    plan = planned(stages, 1, replicas, zones)
    dead = itertools.combinations(sorted(plan.worker_ids()), min(replicas, stages - 1))
    after = [after_loss(plan, set(workers)) for workers in dead if workers]
    if any(adjacent_heirs_differ(plan, one) for one in after):
        assert heirs_may_differ(plan)


def test_a_plan_in_which_heirs_differ() -> None:
    """w0 and w1 are lost: stage 0 goes to w3, which alone holds it, and stage 1 to w2."""
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


def zones_of(plan: Plan) -> dict[str, str]:
    return {p.worker: p.zone for p in plan.workers}


@pytest.mark.parametrize("stages", [3, 4, 6, 7, 8, 9, 12, 64])
def test_two_zones_of_three_may_be_lost_at_once(stages: int) -> None:
    plan = planned(stages, 1, 2, "abc")
    for lost in itertools.combinations("abc", 2):
        dead = {w for w, zone in zones_of(plan).items() if zone in lost}
        assert isinstance(after_loss(plan, dead), Plan), lost


@pytest.mark.parametrize(
    ("stages", "zones", "told"),
    [
        (6, "abc", "; any 2 of 3 zones may be lost at once"),
        (5, "abc", "; any 1 of 3 zones may be lost at once"),
        (6, "ab", "; any 1 of 2 zones may be lost at once"),
        (9, "aaaaaaaab", "; none of 2 zones may be lost"),
        (6, "a", ", 0 spare workers"),
    ],
)
def test_the_first_plan_says_how_many_zones_may_be_lost(stages: int, zones: str, told: str) -> None:
    plan = planned(stages, 1, 2, zones)
    assert plan.message.endswith(told)
    assert "zones" not in planned(stages, 1, 1, zones).message


@pytest.mark.parametrize("stages", [4, 5, 6, 9])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_one_zone_of_three_may_be_lost_at_once(stages: int, replicas: int) -> None:
    plan = planned(stages, 1, replicas, "abc")
    for lost in "abc":
        assert isinstance(after_loss(plan, {w for w, zone in zones_of(plan).items() if zone == lost}), Plan)


def test_where_zones_are_even_the_replicas_are_those_before_and_everyone_keeps_as_many() -> None:
    for replicas in (1, 2, 3):
        plan = planned(12, 1, replicas, "abcd")
        owners = [a.owner for a in plan.pipelines[0]]
        for s, assignment in enumerate(plan.pipelines[0]):
            assert assignment.replicas == tuple(owners[(s - back) % 12] for back in range(1, replicas + 1))


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


# with the coordinator


def world_of(stages: int, pipelines: int, standby: int, replicas: int) -> World:
    """At rest, with several replicas from some time on: an edit of the running job."""
    world = World(stages, pipelines, standby)
    world.settle()
    edited = replace(world.spec, redundancy=RedundancySpec(replicas=replicas))
    world.tell(SpecChanged(edited))
    world.settle()
    return world


def held(world: World) -> set[int]:
    plan = world.state.plan
    assert plan is not None
    return {copies(plan, world.state.synced, c) for c in plan.cells()}


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_number_follows_an_edit_while_the_job_trains(replicas: int) -> None:
    world = world_of(5, 1, 0, replicas)
    assert held(world) == {replicas}
    assert {e.reason for e in world.told} <= {"WorkerJoined", "Started", "Replicating", "Settled"}
    world.tell(SpecChanged(replace(world.spec, redundancy=RedundancySpec())))
    world.settle()
    assert held(world) == {1}


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("first", range(5))
@pytest.mark.parametrize("standby", [0, 2])
def test_neighbours_that_are_lost_one_right_after_the_other_are_taken_over(
    replicas: int, first: int, standby: int
) -> None:
    """Whichever loss is heard of first; and the next ones, once all replicas are there again."""
    for order in itertools.permutations(range(replicas)):
        world = world_of(5, 1, standby, replicas)
        for _ in range(2):
            plan = world.state.plan
            assert plan is not None
            row = [a.owner for a in plan.pipelines[0]]
            for nth in order:
                world.held = {
                    w: {c.stage: world.state.step for c in plan.cells() if w in plan.at(c).holders}
                    for w in plan.worker_ids()
                }
                if (lost := row[(first + nth) % 5]) in world.state.workers:
                    world.lose(lost)
            world.settle()
            assert world.finish is None, world.told[-3:]
            assert min(held(world)) >= 1
            assert held(world) == {replicas}, "others have come, and hold what the lost ones held"


def test_spare_workers_hold_what_too_short_a_ring_cannot() -> None:
    world = world_of(2, 1, 1, 2)
    assert held(world) == {2}
    plan = world.state.plan
    assert plan is not None
    spare = set(world.state.workers) - {plan.at(c).owner for c in plan.cells()}
    assert all(spare < set(plan.at(c).replicas) for c in plan.cells())
    assert held(world_of(2, 1, 0, 2)) == {1}, "there is only one other"
    assert held(world_of(1, 3, 0, 2)) == {2}, "the other pipelines' owners"
    assert held(world_of(1, 2, 1, 2)) == {2}, "the other pipeline's owner and the spare one"


def test_the_shadow_stays_the_worker_before_whatever_happened() -> None:
    """Only that one has the inputs for redundant work."""
    world = world_of(6, 1, 2, 2)
    for _ in range(6):
        plan = world.state.plan
        assert plan is not None
        world.lose(plan.at(Cell(0, 3)).owner)
        world.settle()
        plan = world.state.plan
        assert plan is not None
        row = [a.owner for a in plan.pipelines[0]]
        assert len(set(row)) == 6
        zones = zones_of(plan)
        for s, assignment in enumerate(plan.pipelines[0]):
            if zones[row[s]] != zones[row[s - 1]]:
                assert assignment.shadow == row[s - 1]


# what people are told


def test_protection_says_how_many_hold_a_stage_and_how_many_should() -> None:
    asked = job(redundancy={"replicas": 2})
    full, fewer = said(replicas=2), said(replicas=1)
    told = protection(full, asked)
    assert (told.holds, told.reason) == (True, "InStep")
    assert told.message == "the state of every stage is held by three workers or more, in step"
    told = protection(fewer, asked)
    assert (told.holds, told.reason) == (True, "FewerReplicas")
    assert told.message.startswith("the state of every stage is held by two workers or more, in step; ")
    assert "redundancy.replicas 2 asks for three, " in told.message
    assert protection(fewer, job()).reason == "InStep"


def test_the_status_tells_the_fewest_replicas_in_step() -> None:
    world = world_of(4, 1, 0, 2)
    assert status(world.state, world.now).replicas == 2
    plan = world.state.plan
    assert plan is not None
    world.state = replace(world.state, synced=world.state.synced - {(Cell(0, 1), plan.at(Cell(0, 1)).replicas[1])})
    assert status(world.state, world.now).replicas == 1
    assert not status(world.state, world.now).unprotected


def manifest(**redundancy: Any) -> dict[str, Any]:
    return bamboojob(
        task={"entrypoint": "a:b"}, training=training(1, 8, 1), topology={"stages": 4}, redundancy=redundancy
    )


@pytest.mark.parametrize(
    ("redundancy", "told"),
    [
        ({}, "ends if two neighbouring workers vanish at the same time; "),
        ({"replicas": 2}, "ends if three neighbouring workers vanish at the same time; "),
        ({"replicas": 2}, "with spec.redundancy.replicas: 3 another worker"),
        ({"replicas": 2, "mode": "None"}, "spec.redundancy.replicas 2 has no effect with spec.redundancy.mode None"),
    ],
)
def test_what_replicas_do_not_cover_is_warned_of(redundancy: dict[str, Any], told: str) -> None:
    assert any(told in warning for warning in warnings(parse_manifest(manifest(**redundancy))))


def test_more_replicas_than_there_are_others_is_a_warning() -> None:
    document = manifest(replicas=3)
    assert not any("replicas 3" in warning for warning in warnings(parse_manifest(document)))
    document["spec"]["topology"]["stages"] = 2
    (warning,) = (w for w in warnings(parse_manifest(document)) if "replicas 3" in w)
    assert warning == "spec.redundancy.replicas 3: a worker has only 1 other to hold its stage's state"
