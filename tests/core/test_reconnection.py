"""Reconnection of workers after a restart of the coordinator: the wait for them, and refusals."""

from dataclasses import replace

import pytest

from bamboo_core.control import protocol
from bamboo_core.control.protocol import Received, WorkerJoined
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.checkpointing.saving import STOP_SECONDS
from bamboo_core.coordinator.events import (
    Interrupted,
    Outcome,
    Tick,
    WorkerLost,
    WorkersAbsent,
)
from bamboo_core.planning.plan import Cell
from checkpoint_world import save, sent
from world import World, back, restarted, silence


def test_a_restarted_coordinator_does_not_wait_for_workers_without_a_trace() -> None:
    """A restarted coordinator does not wait for workers of its plan whose pods `WorkersAbsent` reports as gone."""
    world = World(4, 1, 0)
    world.settle()
    plan = world.plan
    begun = coordinator.initial(world.spec, world.document, secret="", now=world.now, resumed=True)
    world.state = replace(begun, membership=replace(begun.membership, requested=3))
    back(world, "w0", plan)
    world.tell(WorkersAbsent(frozenset({"w0", "w1"}), "its pod is gone"))
    assert (world.state.membership.gone, world.state.membership.requested, world.state.membership.preemptions) == (
        {"w1"},
        2,
        1,
    ), "w0 is here"
    for worker in ("w2", "w3"):
        back(world, worker, plan)
    assert world.state.phase == "Running", "no time has passed"


@pytest.mark.parametrize(("exit_code", "preemptions"), [(0, 0), (None, 1)])
def test_a_worker_that_left_by_order_before_the_restart_was_not_preempted(
    exit_code: int | None, preemptions: int
) -> None:
    world = World(2, 1, 1)
    world.settle()
    begun = coordinator.initial(world.spec, world.document, secret="", now=world.now, resumed=True)
    world.state = replace(begun, membership=replace(begun.membership, requested=3))
    world.tell(WorkerLost("w2", "the pod has ended", exit_code))
    assert world.state.membership.preemptions == preemptions
    assert world.state.membership.gone == {"w2"}


def test_a_restarted_coordinator_waits_for_owners_as_long_as_steps_are_committed() -> None:
    world = World(4, 2, 0)
    plan = restarted(world)
    root = plan.at(Cell(0, 0)).owner
    back(world, root, plan)
    for _ in range(100):
        world.commit()
        silence(world, set(), 1)
    assert (world.state.phase, world.finish) == ("Recovering", None)
    for worker in sorted(plan.worker_ids() - {root}):
        back(world, worker, plan)
    assert (world.state.phase, world.state.membership.preemptions) == ("Running", 0)


def test_a_restarted_coordinator_that_misses_most_waits_longer() -> None:
    world = World(4, 1, 0)
    plan = restarted(world)
    back(world, "w0", plan)
    silence(world, set(), 38)
    assert world.state.phase == "Recovering"
    silence(world, set(), 4)
    assert world.state.phase != "Recovering"


def test_a_restarted_coordinator_refuses_those_that_the_newest_plan_does_not_know() -> None:
    world = World(2, 1, 1)
    world.settle()
    old = world.plan
    world.lose("w2")
    world.lost.clear()
    world.settle()
    newest = world.state.plan
    world.state = coordinator.initial(world.spec, world.document, secret="", now=world.now)
    world.tell(WorkerJoined(protocol.Hello(worker="w2", host="h", port=1, plan=old)))
    world.tell(Received("w2", protocol.WorkerReady()))
    assert newest is not None
    for worker in newest.worker_ids():
        world.tell(WorkerJoined(protocol.Hello(worker=worker, host="h", port=1, plan=newest)))
        world.tell(Received(worker, protocol.WorkerReady()))
    assert world.state.phase == "Running"
    assert "w2" not in world.state.workers
    assert "w2" in world.state.membership.gone


SUSPENDED = Interrupted("Suspended", "the job is suspended")


def kept(world: World) -> None:
    """Save the checkpoint that the coordinator requests, which completes the suspension."""
    world.tell(Tick())
    _, wish = sent(world, protocol.TakeCheckpoint)[-1]
    assert (wish.pause, world.finish) == (True, None)
    save(world, wish.at, "b")
    assert (world.end.outcome, world.end.reason) == (Outcome.INTERRUPTED, "Suspended")


@pytest.mark.parametrize("heard", [True, False])
def test_a_restarted_coordinator_that_is_told_to_suspend_hears_its_workers_first(*, heard: bool) -> None:
    """A restarted coordinator waits for all workers, then suspends the job. heard: the root reports a commit first."""
    world = World(2, 1, 0, checkpoint={"everySteps": 1000})
    plan = restarted(world)
    root, *others = sorted(plan.worker_ids(), key=lambda worker: worker != plan.at(Cell(0, 0)).owner)
    world.tell(SUSPENDED)
    back(world, root, plan)
    if heard:
        world.commit()
    assert (world.state.phase, world.finish, sent(world, protocol.TakeCheckpoint)) == ("Recovering", None, [])
    for worker in others:
        back(world, worker, plan)
    kept(world)


def test_a_restarted_coordinator_to_which_nobody_comes_back_ends_after_two_minutes_all_the_same() -> None:
    world = World(2, 1, 0, checkpoint={"everySteps": 1000})
    restarted(world)
    world.tell(SUSPENDED)
    silence(world, set(), int(STOP_SECONDS) - 1)
    assert world.finish is None
    silence(world, set(), 2)
    assert (world.end.outcome, world.end.reason) == (Outcome.INTERRUPTED, "Suspended")
