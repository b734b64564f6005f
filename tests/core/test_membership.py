"""Membership of workers in a job: joining, notices, and when the coordinator declares workers lost."""

import pytest

from bamboo_core.control import protocol
from bamboo_core.control.protocol import ChannelClosed, Received, WorkerJoined
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import (
    Emit,
    NoticeWithdrawn,
    PreemptionNotice,
    Send,
    Tick,
)
from bamboo_core.coordinator.job_status import status
from bamboo_core.coordinator.workers.membership import EARLY_SECONDS
from bamboo_core.planning.plan import Cell
from world import World, silence


def test_a_lost_worker_never_returns() -> None:
    world = World(2, 1, 1)
    world.settle()
    world.lose("w0")
    state, commands = coordinator.step(
        world.state, WorkerJoined(protocol.Hello(worker="w0", host="h", port=1)), world.now
    )
    assert "w0" not in state.workers
    assert any(isinstance(c, Send) and isinstance(c.message, protocol.Refused) for c in commands)


@pytest.mark.parametrize(
    ("silent", "within", "after"),
    [
        ({"w0"}, 4, 6),
        ({"w0", "w3"}, 4, 6),
        ({"w0", "w1", "w2"}, 33, 37),
        ({"w0", "w1", "w2", "w3"}, 300, 307),
    ],
)
def test_a_coordinator_that_misses_most_workers_doubts_itself_first(silent: set[str], within: int, after: int) -> None:
    world = World(2, 2, 0)
    world.settle()
    assert len(world.state.workers) == 4
    silence(world, silent, within)
    assert world.state.workers.keys() >= silent
    silence(world, silent, after - within)
    assert not world.state.workers.keys() & silent


def test_the_first_worker_that_comes_back_is_not_the_last() -> None:
    """A coordinator that was unreachable for a minute waits for all workers, not only for the first that returns."""
    world = World(2, 2, 0)
    world.settle()
    workers = set(world.state.workers)
    for worker in sorted(workers):
        world.tell(ChannelClosed(worker))
    silence(world, workers, 60.0)
    away = set(workers)
    for worker in sorted(workers):
        world.tell(WorkerJoined(protocol.Hello(worker=worker, host="h", port=1, plan=world.state.plan)))
        away.discard(worker)
        silence(world, away, 1.5)
    assert world.state.workers.keys() == workers
    world.tell(ChannelClosed("w0"))
    silence(world, {"w0"}, 12.0)
    assert "w0" not in world.state.workers, "its patience ends"


def test_a_commit_speaks_for_all_owners() -> None:
    world = World(2, 1, 1)
    world.settle()
    plan = world.plan
    owner = plan.at(Cell(0, 1)).owner
    (standby,) = world.state.workers.keys() - {plan.at(c).owner for c in plan.cells()}
    root = plan.at(Cell(0, 0)).owner
    for step in range(20):
        message = protocol.StepCommitted(
            step=step,
            generation=0,
            loss=1.0,
            gradient_norm=2.0,
            microbatches=4,
            seconds=0.5,
            learning_rate=1 / (1 + step),
            metrics={"step": float(step), "none": None},
        )
        world.tell(Received(root, message))
        silence(world, {owner, standby} if step > 10 else {owner}, 0.5)
    told = status(world.state, world.now)
    assert (told.gradient_norm, told.learning_rate) == (2.0, 1 / 20), "what is told is of the newest step"
    assert told.metrics == (("none", None), ("step", 19.0))
    assert owner in world.state.workers
    silence(world, {owner}, 6)
    assert owner not in world.state.workers


def test_a_cut_channel_with_a_broken_link_beside_it_is_a_loss() -> None:
    for channel_first in (False, True):
        world = World(3, 1, 0)
        world.settle()
        events = [Received("w0", protocol.PeerDown(peer="w1")), ChannelClosed("w1")]
        for event in reversed(events) if channel_first else events:
            assert "w1" in world.state.workers
            world.tell(event)
        assert "w1" not in world.state.workers


def test_a_link_that_stays_broken_costs_the_worker_that_most_others_cannot_reach() -> None:
    world = World(4, 1, 0)
    world.settle()
    for reporter, peer in (("w0", "w2"), ("w1", "w2"), ("w3", "w0")):
        world.tell(Received(reporter, protocol.PeerDown(peer=peer)))
    world.tell(Received("w3", protocol.PeerUp(peer="w0")))
    world.now += 6
    for worker in ("w0", "w1", "w2", "w3"):
        world.tell(Received(worker, protocol.Heartbeat(step=1)))
    world.tell(Tick())
    assert "w2" not in world.state.workers
    assert {"w0", "w1", "w3"} <= set(world.state.workers)


def test_a_notice_that_is_withdrawn_changes_nothing_more() -> None:
    world = World(3, 1, 0)
    world.settle()
    world.tell(PreemptionNotice("w1", 1e9))
    world.tell(NoticeWithdrawn("w1"))
    world.settle()
    assert world.state.stays("w1")
    assert {len(world.plan.owned_by(w)) for w in world.plan.worker_ids()} <= {0, 1}


def test_a_later_notice_can_only_shorten_the_time() -> None:
    world = World(3, 1, 1)
    world.settle()
    world.tell(PreemptionNotice("w1", 120))
    until = world.state.membership.leaving["w1"].until
    world.tell(PreemptionNotice("w1", 500))
    assert world.state.membership.leaving["w1"].until == until
    world.tell(PreemptionNotice("w1", 30))
    assert world.state.membership.leaving["w1"].seconds == 30
    assert world.state.membership.preemptions == 1


def test_the_notice_of_a_worker_that_has_not_joined_holds_when_it_does() -> None:
    world = World(3, 1, 0)
    cause = Emit("SpotInterruption", "w9: its node has the taint", True)
    for _ in range(2):
        world.tell(PreemptionNotice("w9", 120, cause=cause))
    assert world.told.count(cause) == 1
    until = world.state.membership.leaving["w9"].until
    world.now += 20
    world.tell(WorkerJoined(protocol.Hello(worker="w9", host="h", port=1)))
    assert world.state.membership.leaving["w9"].until == until
    assert world.state.membership.notices == 1
    world.tell(PreemptionNotice("w9", 100, cause=cause))
    assert world.told.count(cause) == 1


@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_worker_that_never_joins_is_lost_some_time_after_its_notice(withdrawn: bool) -> None:
    world = World(3, 1, 0)
    world.tell(PreemptionNotice("w9", 120))
    if withdrawn:
        world.tell(NoticeWithdrawn("w9"))
    world.now += 119 + EARLY_SECONDS
    world.tell(Tick())
    assert "w9" not in world.state.membership.gone
    world.now += 2
    world.tell(Tick())
    assert ("w9" in world.state.membership.gone) == (not withdrawn)


def test_what_is_given_back_is_no_preemption() -> None:
    world = World(3, 1, 1)
    world.settle()
    world.tell(PreemptionNotice("w1", 3600, wanted=True))
    world.settle()
    assert (world.state.membership.preemptions, world.state.membership.notices) == (0, 0)
    assert not world.plan.owned_by("w1")
