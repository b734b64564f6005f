"""Waiting of the coordinator for workers: late answers, takeover reports, and returns after a restart."""

from collections import deque
from dataclasses import replace

import pytest

from bamboo_core.control import protocol
from bamboo_core.control.protocol import Received
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import Emit, Finish, Send, Tick
from bamboo_core.planning.plan import Cell
from world import World, back, restarted, silence


def asked_around(world: World) -> str:
    """Lose all holders of stage 1. Drop the pending reports of the other workers, and return one of those workers."""
    world.settle()
    plan = world.plan
    cell = Cell(0, 1)
    for worker in plan.at(cell).holders:
        world.lose(worker)
    assert world.state.inquiry.began_at is not None
    world.pending = deque(e for e in world.pending if not isinstance(getattr(e, "message", None), protocol.Report))
    return min(plan.worker_ids() - {*plan.at(cell).holders})


def answer(world: World, held: dict[str, dict[int, int]]) -> None:
    for worker in sorted(world.state.workers):
        if worker in held:
            message = protocol.Report(committed=world.state.step - 1, held=held[worker])
            world.tell(Received(worker, message))


def test_a_worker_that_answers_late_is_waited_for() -> None:
    world = World(4, 1, 0)
    late = asked_around(world)
    others = sorted(world.state.workers.keys() - {late})
    answer(world, {w: {} for w in others})
    silence(world, set(), 60)
    assert world.finish is None
    message = protocol.Report(committed=world.state.step - 1, held={1: world.state.step})
    state, _ = coordinator.step(world.state, Received(late, message), world.now)
    assert state.plan is not None
    assert state.plan.at(Cell(0, 1)).owner == late


def test_who_is_asked_for_copies_is_not_asked_at_the_speed_of_the_network() -> None:
    world = World(4, 1, 0)
    asked_around(world)
    state, now, begun, rounds = world.state, world.now, world.now, 0
    report = protocol.Report(committed=state.step - 1, held={})
    while state.phase != "Over":
        now += 0.001
        for event in (Tick(), *(Received(w, report) for w in sorted(state.workers))):
            state, commands = coordinator.step(state, event, now)
            rounds += any(isinstance(c, Send) and isinstance(c.message, protocol.ReportRequest) for c in commands)
    assert now - begun == pytest.approx(1.0, abs=0.2)
    assert 8 <= rounds <= 11


def test_a_takeover_counts_although_its_cell_moves_on_before_it_is_over() -> None:
    world = World(4, 1, 1)
    world.settle()
    cell = Cell(0, 2)
    victim = world.plan.at(cell).owner
    world.lose(victim)
    heir = world.plan.at(cell).owner
    unsaid = [e for e in world.pending if isinstance(getattr(e, "message", None), protocol.TakenOver)]
    assert [e.worker for e in unsaid] == [heir]
    world.pending.remove(*unsaid)
    world.settle()
    assert (owner := world.plan.at(cell).owner) not in (victim, heir)
    assert [(t.victim, t.worker, t.notice) for t in world.state.moves.takeovers] == [(victim, owner, False)]


def test_a_restarted_coordinator_waits_for_workers_that_live_and_says_so_once() -> None:
    world = World(2, 1, 0)
    plan = restarted(world)
    said: list[Emit] = []
    for _ in range(299):
        world.now += 5
        world.state, commands = coordinator.step(world.state, Tick(), world.now)
        said += [c for c in commands if isinstance(c, Emit)]
    assert world.state.phase == "Recovering"
    assert [(e.reason, e.warning) for e in said] == [("WorkersSilent", True)]
    assert "2 workers running" in said[0].message
    for worker in sorted(plan.worker_ids()):
        back(world, worker, plan)
    assert world.state.phase == "Running"


@pytest.mark.parametrize(("living", "seconds"), [(0, 10), (2, 1800)])
def test_a_restarted_coordinator_gives_up_when_the_deadline_for_progress_has_passed(living: int, seconds: int) -> None:
    world = World(2, 1, 0)
    restarted(world)
    world.state = replace(world.state, membership=replace(world.state.membership, requested=living))
    for when, over in ((seconds - 1, False), (seconds + 1, True)):
        state, commands = coordinator.step(world.state, Tick(), world.now + when)
        assert (state.phase == "Over") is over
    assert [c.reason for c in commands if isinstance(c, Finish)] == ["WorkersGone"]
