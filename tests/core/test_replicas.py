"""Several replicas of each stage: which losses they cover, who goes on with what, and what people are told of it."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.coordinator.events import SpecChanged
from bamboo_core.coordinator.protection import protection
from bamboo_core.job.spec import RedundancySpec
from bamboo_core.planning.heirs import heirs_may_differ
from bamboo_core.planning.plan import Cell, Plan, plan_problems
from operator_kit import job, said
from replica_kit import adjacent_heirs_differ, after_loss, copies, planned
from world import World

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


def zones_of(plan: Plan) -> dict[str, str]:
    return {p.worker: p.zone for p in plan.workers}


@pytest.mark.parametrize("stages", [3, 4, 6, 7, 8, 9, 12, 64])
def test_two_zones_of_three_may_be_lost_at_once(stages: int) -> None:
    plan = planned(stages, 1, 2, "abc")
    for lost in itertools.combinations("abc", 2):
        dead = {w for w, zone in zones_of(plan).items() if zone in lost}
        assert isinstance(after_loss(plan, dead), Plan), lost


def test_where_zones_are_even_the_replicas_are_those_before_and_everyone_keeps_as_many() -> None:
    for replicas in (1, 2, 3):
        plan = planned(12, 1, replicas, "abcd")
        owners = [a.owner for a in plan.pipelines[0]]
        for s, assignment in enumerate(plan.pipelines[0]):
            assert assignment.replicas == tuple(owners[(s - back) % 12] for back in range(1, replicas + 1))


def world_of(stages: int, pipelines: int, standby: int, replicas: int) -> World:
    """At rest, with several replicas from some time on: an edit of the running job."""
    world = World(stages, pipelines, standby)
    world.settle()
    edited = replace(world.spec, redundancy=RedundancySpec(replicas=replicas))
    world.tell(SpecChanged(edited))
    world.settle()
    return world


def held(world: World) -> set[int]:
    plan = world.plan
    return {copies(plan, world.state.plans.synced, c) for c in plan.cells()}


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
            plan = world.plan
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
    plan = world.plan
    spare = set(world.state.workers) - {plan.at(c).owner for c in plan.cells()}
    assert all(spare < set(plan.at(c).replicas) for c in plan.cells())
    assert held(world_of(2, 1, 0, 2)) == {1}, "there is only one other"
    assert held(world_of(1, 3, 0, 2)) == {2}, "the other pipelines' owners"
    assert held(world_of(1, 2, 1, 2)) == {2}, "the other pipeline's owner and the spare one"


def test_the_shadow_stays_the_worker_before_whatever_happened() -> None:
    """Only that one has made its inputs."""
    world = world_of(6, 1, 2, 2)
    for _ in range(6):
        plan = world.plan
        world.lose(plan.at(Cell(0, 3)).owner)
        world.settle()
        plan = world.plan
        row = [a.owner for a in plan.pipelines[0]]
        assert len(set(row)) == 6
        zones = zones_of(plan)
        for s, assignment in enumerate(plan.pipelines[0]):
            if zones[row[s]] != zones[row[s - 1]]:
                assert assignment.shadow == row[s - 1]


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
