"""Whom the coordinator waits for, and for how long: answers, reports of takeovers, workers after its own restart."""

from collections import deque
from dataclasses import replace

import msgspec
import pytest

from bamboo_core.control import protocol
from bamboo_core.control.channel_events import Received
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import AddWorkers, Emit, Finish, Send, Tick
from bamboo_core.coordinator.workers.record import Workers
from bamboo_core.planning.plan import Cell
from world import World, back, restarted, silence, taken_over


def asked_around(world: World) -> str:
    """A stage's last owner and replica are lost at once, and everybody is asked; the one of whom more is known."""
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


def test_a_worker_that_answers_late_is_waited_for_as_long_as_it_lives() -> None:
    world = World(4, 1, 0)
    late = asked_around(world)
    answer(world, {w: {} for w in world.state.workers if w != late})
    silence(world, {late}, 6)
    assert late not in world.state.workers
    assert world.finish is None or world.finish.reason == "StageLost"
    for _ in range(20):
        if world.finish is None:
            answer(world, {w: {} for w in world.state.workers})
            silence(world, set(), 0.5)
    assert world.finish is not None
    assert world.finish.reason == "StageLost"


def test_a_worker_that_the_newest_plan_has_not_reached_has_nothing_and_is_heard() -> None:
    """The job has gone on from a cut with other stages, and holders were lost before a newcomer had that plan."""
    world = World(4, 1, 0)
    world.settle()
    plan = world.plan
    lost = plan.at(Cell(0, 1)).holders
    newcomer = min(plan.worker_ids() - {*lost})
    began = {w: replace(r, origin=0 if w == newcomer else 2) for w, r in world.state.workers.items()}
    world.state = replace(
        world.state,
        workers=Workers(began),
        plans=replace(world.state.plans, newest=msgspec.structs.replace(plan, origin=2)),
    )
    for worker in lost:
        world.lose(worker)
    world.pending = deque(e for e in world.pending if not isinstance(getattr(e, "message", None), protocol.Report))
    for _ in range(20):
        if world.finish is None:
            answer(world, {w: {1: 0} if w == newcomer else {} for w in world.state.workers})
            silence(world, set(), 0.5)
    assert world.finish is not None
    assert world.finish.reason == "StageLost"


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


def test_a_takeover_whose_heir_dies_before_it_reports_shifts_no_later_one() -> None:
    world = World(4, 2, 0)
    world.settle()
    cell = Cell(0, 1)
    victims = []
    for _ in range(2):
        victims.append(world.plan.at(cell).owner)
        world.lose(victims[-1])
    plan = world.plan
    heir = plan.at(cell).owner
    world.tell(Received(heir, taken_over(plan, cell)))
    (taken,) = [t for t in world.state.moves.takeovers if (t.pipeline, t.stage) == cell]
    assert (taken.victim, taken.worker, taken.epoch) == (victims[1], heir, plan.epoch)
    assert not any(cell in dict(r.victims) for r in world.state.moves.recoveries)


def test_a_takeover_whose_report_is_lost_is_forgotten_in_the_end() -> None:
    world = World(3, 1, 1)
    world.settle()
    world.lose(world.plan.at(Cell(0, 1)).owner)
    while world.pending or not world.state.plans.applied >= world.plan.worker_ids():
        event = world.pending[0]
        if isinstance(getattr(event, "message", None), protocol.TakenOver):
            world.pending.popleft()
        else:
            world.deliver()
    assert world.state.moves.recoveries
    assert not world.state.plans.steady
    world.settle()
    assert world.state.moves.recoveries
    world.now += 100
    for worker in world.state.workers:
        world.tell(Received(worker, protocol.Heartbeat(step=1)))
    for _ in range(5):  # commits
        world.settle()
    assert (world.state.moves.recoveries, world.state.plans.steady) == ((), True)


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


def short_of_a_worker() -> World:
    """A worker is lost and taken over; another one is to be asked for from a moment on that has just passed."""
    world = World(4, 1, 0)
    world.settle()
    world.away = 1
    world.lose(world.plan.at(Cell(0, 1)).owner)
    world.pending.clear()
    world.state = replace(
        world.state,
        membership=replace(world.state.membership, requested=0),
        admission=replace(world.state.admission, ask_at=world.now + 5),
    )
    world.now += 10
    return world


def test_of_the_answers_to_a_plan_the_last_one_decides() -> None:
    world = short_of_a_worker()
    plan = world.plan
    *others, last = sorted(plan.worker_ids())
    state = world.state
    for number, worker in enumerate(others, 1):
        state, commands = coordinator.step(state, Received(worker, protocol.PlanApplied(epoch=plan.epoch)), world.now)
        assert commands == ()
        assert state.plans.applied == frozenset(others[:number])
    state, commands = coordinator.step(state, Received(last, protocol.PlanApplied(epoch=plan.epoch)), world.now)
    assert AddWorkers(1) in commands


def test_a_copy_that_is_known_is_not_decided_on_again() -> None:
    world = short_of_a_worker()
    (cell, replica), *_ = sorted(world.state.plans.synced)
    plan = world.plan
    message = Received(plan.at(cell).owner, protocol.ReplicaSynced(cell=cell, replica=replica))
    _, known = coordinator.step(world.state, message, world.now)
    assert known == ()
    before = replace(world.state, plans=replace(world.state.plans, synced=world.state.plans.synced - {(cell, replica)}))
    after, new = coordinator.step(before, message, world.now)
    assert after.plans.synced == world.state.plans.synced
    assert AddWorkers(1) in new


@pytest.mark.parametrize("away", [Cell(2, 0), Cell(0, 4), Cell(-1, 0), Cell(0, -1)])
def test_what_is_said_of_a_cell_that_the_plan_has_not_is_not_heard(away: Cell) -> None:
    world = World(4, 1, 0)
    world.settle()
    plan = world.plan
    assert not plan.has(away)
    worker = plan.at(Cell(0, 0)).owner
    state, _ = coordinator.step(
        world.state, Received(worker, protocol.ReplicaSynced(cell=away, replica=worker)), world.now
    )
    assert state.plans.synced == world.state.plans.synced
