"""The status of a job, built from the coordinator's state."""

from dataclasses import replace

from bamboo_core.control import protocol
from bamboo_core.control.protocol import Received
from bamboo_core.coordinator.events import Tick
from bamboo_core.coordinator.job_status import WorkerState, status
from world import World


def test_a_job_that_stands_still_says_who_waits_for_what() -> None:
    world = World(2, 1, 0)
    world.settle()
    world.now += 2000
    for worker in world.state.workers:
        world.tell(Received(worker, protocol.Heartbeat(step=1, doing="waiting for rain")))
    world.tell(Tick())
    assert world.end.reason == "ProgressDeadlineExceeded"
    assert "w1 is waiting for rain" in world.end.message


def test_a_long_step_goes_on_as_long_as_microbatches_are_finished() -> None:
    world = World(2, 1, 0)
    world.settle()
    limit = world.spec.progress_deadline_seconds
    for backwards in range(1, 4):
        world.now += limit - 1
        for worker in world.state.workers:
            world.tell(Received(worker, protocol.Heartbeat(step=1, backwards=backwards * (worker == "w0"))))
        world.tell(Tick())
        assert world.finish is None
    world.now += limit + 1
    for worker in world.state.workers:
        world.tell(Received(worker, protocol.Heartbeat(step=1, backwards=3 * (worker == "w0"))))
    world.tell(Tick())
    assert world.end.reason == "ProgressDeadlineExceeded"


def test_a_spare_worker_whose_replicas_are_in_step_is_on_standby() -> None:
    world = World(1, 1, 1)
    world.deliver()
    world.deliver()
    assert (world.plans, status(world.state, world.now).ready) == ([], 1), "it has loaded its task, and waits"
    world.settle()
    plan = world.plan
    (spare,) = world.state.workers.keys() - {plan.at(c).owner for c in plan.cells()}
    assert len(plan.replicated_by(spare)) == 1
    assert dict(status(world.state, world.now).workers)[spare] is WorkerState.STANDBY
    world.state = replace(world.state, plans=replace(world.state.plans, synced=frozenset()))
    assert dict(status(world.state, world.now).workers)[spare] is WorkerState.SYNCING
