"""Decisions of the planner: requests for workers, takeovers, and plans of a given split."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_core.control.protocol import WorkerJoined
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import (
    AddWorkers,
    NoticeWithdrawn,
    Outcome,
    PreemptionNotice,
    SpecChanged,
)
from bamboo_core.coordinator.workers.membership import surplus_requests
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import whole_workers
from bamboo_core.planning.plan import plan_misfits
from world import World

changes = st.lists(
    st.tuples(st.sampled_from(["edit", "away", "lose", "notice", "stay", "deliver"]), st.integers(0, 20)), max_size=30
)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), changes)
def test_no_more_workers_are_to_come_than_are_wanted(stages: int, what: list[tuple[str, int]]) -> None:
    world = World(stages, 2, 0, chooses=("pipelines",))
    world.settle()
    for action, index in what:
        names = sorted(world.state.workers)
        worker = names[index % len(names)] if names else None
        if action == "edit":
            world.edit(elastic={"maxWorkers": stages * (1 + index % 4)})
        elif action == "away":
            world.away += index % 4
        elif action == "deliver" and world.pending:
            world.deliver()
        elif worker and action == "lose":
            world.lose(worker)
        elif worker and action == "notice":
            world.tell(PreemptionNotice(worker, 1e9))
        elif worker and action == "stay":
            world.tell(NoticeWithdrawn(worker))
        world.withdraw()
        if world.finish:
            return
        state = world.state
        coming = sum(isinstance(event, WorkerJoined) for event in world.pending)
        staying = sum(map(state.stays, state.workers))
        missing = max(0, whole_workers(state.spec) - staying)
        assert state.membership.requested == coming + world.unmade, "the coordinator does not know what will come"
        assert state.membership.requested >= missing
        assert world.unmade <= max(0, missing - coming), "more than are wanted now would be made"


def test_requests_that_are_withdrawn_are_made_anew_when_they_are_wanted() -> None:
    world = World(2, 1, 0, chooses=("pipelines",))
    world.away = 4
    world.settle()
    assert world.spec.elastic is not None
    more, fewer = (replace(world.spec.elastic, max_workers=n) for n in (6, 2))
    world.tell(SpecChanged(replace(world.spec, elastic=more)))
    assert (world.state.membership.requested, world.unmade) == (4, 4)
    world.tell(SpecChanged(replace(world.spec, elastic=fewer)))
    assert surplus_requests(world.state) == 4
    world.withdraw()
    assert (world.state.membership.requested, world.unmade, surplus_requests(world.state)) == (0, 0, 0)
    _, commands = coordinator.step(world.state, SpecChanged(replace(world.spec, elastic=more)), world.now)
    assert AddWorkers(4) in commands


def test_a_notice_shorter_than_a_step_does_not_wait_for_its_end() -> None:
    world = World(3, 1, 0)
    world.settle()
    world.tell(PreemptionNotice("w1", 0.05))
    assert world.plan.reason == "PlannedTakeover"
    assert not world.plan.boundary


def test_a_split_that_the_manifest_gives_is_that_of_every_plan() -> None:
    """Plans after a takeover and after healing keep the manifest's split; a plan with another split is a misfit."""
    world = World(3, 1, 1, split=[1, 5, 2])
    world.settle()
    world.lose(world.plans[-1].pipelines[0][1].owner)
    world.settle()
    assert len(world.plans) > 2
    assert {plan.stages for plan in world.plans} == {((0, 1), (1, 6), (6, 8))}
    assert plan_misfits(world.plans[-1], world.spec) == []
    other = parse_manifest(World(3, 1, 1, split=[2, 4, 2]).document)
    assert plan_misfits(world.plans[-1], other) == ["the stages do not have the layers that spec.topology.split says"]


@pytest.mark.parametrize(("stages", "split"), [(2, [3, 4]), (9, None)])
def test_a_grid_that_does_not_fit_the_model_ends_the_job_as_soon_as_the_first_worker_is_there(
    stages: int, split: list[int] | None
) -> None:
    """The job fails once its first worker reports 8 layers, if the manifest sets 9 stages or a split of 7 layers."""
    world = World(stages, 1, 0, split=split)
    while len(world.pending) > 2:
        world.pending.pop()  # only the first one comes, and is ready
    while world.finish is None and world.pending:
        world.deliver()
    assert (world.end.outcome, world.end.reason) == (Outcome.FAILED, "InvalidTopology")
    assert "spec.topology." in world.end.message
    assert "8 layers" in world.end.message
    assert list(world.state.workers) == ["w0"]
