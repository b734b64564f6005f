"""The coordinator: Hypothesis for the invariants, tables for single decisions."""

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo.control import protocol
from bamboo.control.channel_events import ChannelClosed, Received, WorkerJoined
from bamboo.coordinator import coordinator, planner
from bamboo.coordinator.events import (
    AddWorkers,
    NoticeWithdrawn,
    Outcome,
    PreemptionNotice,
    Send,
    SpecChanged,
    Tick,
)
from bamboo.coordinator.job_status import status
from bamboo.coordinator.state import changed
from bamboo.coordinator.workers.membership import surplus_requests
from bamboo.job.manifest import parse_manifest
from bamboo.planning.plan import Cell, Plan, plan_misfits
from bamboo.planning.transitions import PlanningView, improve, is_protected
from world import World, silence

actions = st.lists(
    st.tuples(st.sampled_from(["lose", "notice", "deliver", "settle", "cut", "away"]), st.integers(0, 20)),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.integers(1, 2), st.integers(0, 1), st.integers(0, 2), st.integers(0, 3), actions)
def test_invariants_hold_whatever_happens(
    stages: int, pipelines: int, fewer: int, more: int, standby: int, what: list[tuple[str, int]]
) -> None:
    world = World(stages, pipelines, standby, max(1, pipelines - fewer), pipelines + more)
    world.settle()
    for action, index in what:
        if world.finish:
            break
        names = sorted(world.state.workers)
        worker = names[index % len(names)] if names else None
        if action == "deliver" and world.pending:
            world.deliver()
        elif action == "settle":
            world.settle()
        elif worker and action == "lose":
            world.lose(worker)
        elif worker and action == "notice":
            world.tell(PreemptionNotice(worker, 1e9))
        elif action == "away":
            world.away += index % 4
        elif worker and action == "cut":
            world.tell(ChannelClosed(worker))
            world.tell(WorkerJoined(protocol.Hello(worker=worker, host="h", port=1)))
    world.settle()
    if world.finish:
        assert world.finish.outcome is Outcome.UNRECOVERABLE
        return
    plan = world.state.plan
    if plan is None:
        assert len(world.state.workers) < stages * pipelines
        return
    elastic, workers = world.spec.elastic, sum(r.notice_until is None for r in world.state.workers.values())
    for worker, record in world.state.workers.items():
        if record.notice_until is not None and workers:
            assert not plan.owned_by(worker), "a leaving worker still owns a cell, at rest"
    wanted = max(elastic.min_pipelines, min(elastic.max_pipelines, workers // stages))
    assert len(plan.layouts) == 1
    assert len(plan.pipelines) == plan.target.pipelines == wanted, "not resized at rest"
    if workers >= stages * wanted:
        assert all(len(plan.owned_by(w)) <= 1 for w in world.state.workers), "not healed, although workers were there"
    if stages > 1 and workers > 1:
        for cell in plan.cells():
            assert is_protected(plan, world.state.synced, cell), f"{cell} is unprotected at rest"


changes = st.lists(
    st.tuples(st.sampled_from(["edit", "away", "lose", "notice", "stay", "deliver"]), st.integers(0, 20)), max_size=30
)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), changes)
def test_no_more_workers_are_to_come_than_are_wanted(stages: int, what: list[tuple[str, int]]) -> None:
    world = World(stages, 1, 0, 1, 2)
    world.settle()
    for action, index in what:
        names = sorted(world.state.workers)
        worker = names[index % len(names)] if names else None
        if action == "edit":
            spec = world.state.spec
            world.tell(SpecChanged(replace(spec, elastic=replace(spec.elastic, max_pipelines=1 + index % 4))))
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
        staying = sum(record.notice_until is None for record in state.workers.values())
        missing = max(0, stages * max(1, state.spec.elastic.max_pipelines) - staying)
        assert state.requested == coming + world.unmade, "the coordinator does not know what will come"
        assert state.requested >= missing
        assert world.unmade <= max(0, missing - coming), "more than are wanted now would be made"


def test_requests_that_are_withdrawn_are_made_anew_when_they_are_wanted() -> None:
    world = World(2, 1, 0)
    world.away = 4
    more, fewer = (replace(world.spec.elastic, max_pipelines=n) for n in (3, 1))
    world.settle()
    world.tell(SpecChanged(replace(world.spec, elastic=more)))
    assert (world.state.requested, world.unmade) == (4, 4)
    world.tell(SpecChanged(replace(world.spec, elastic=fewer)))
    assert surplus_requests(world.state) == 4
    world.withdraw()
    assert (world.state.requested, world.unmade, surplus_requests(world.state)) == (0, 0, 0)
    _, commands = coordinator.step(world.state, SpecChanged(replace(world.spec, elastic=more)), world.now)
    assert AddWorkers(4) in commands


def test_a_lost_worker_never_returns() -> None:
    world = World(2, 1, 1)
    world.settle()
    world.lose("w0")
    state, commands = coordinator.step(
        world.state, WorkerJoined(protocol.Hello(worker="w0", host="h", port=1)), world.now
    )
    assert "w0" not in state.workers
    assert any(isinstance(c, Send) and isinstance(c.message, protocol.Refused) for c in commands)


def test_a_silent_worker_is_declared_lost() -> None:
    world = World(2, 1, 0)
    world.settle()
    world.now += 100
    world.tell(Received("w1", protocol.Heartbeat(step=1)))
    world.tell(Tick())
    assert "w0" not in world.state.workers
    assert "w1" in world.state.workers


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


@pytest.mark.parametrize(("cut", "lost"), [(4, 0), (3, 0), (2, 2), (1, 1)])
def test_channels_that_close_one_after_the_other_are_seen_as_one(cut: int, lost: int) -> None:
    """All are silent from the same moment on; the first must not be given up before the others are missed."""
    world = World(2, 2, 0)
    world.settle()
    unheard = set(sorted(world.state.workers)[:cut])
    for worker in sorted(unheard):
        silence(world, unheard, 1.0)
        world.tell(ChannelClosed(worker))
    silence(world, unheard, 4.0)
    assert len(unheard - world.state.workers.keys()) == lost


def test_the_first_worker_that_comes_back_is_not_the_last() -> None:
    """After a minute in which nobody reached the coordinator."""
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
    plan = world.state.plan
    assert plan is not None
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


def test_what_a_worker_invents_is_not_kept() -> None:
    world = World(2, 1, 0)
    world.settle()
    before = world.state
    for number in range(20):
        for message in (
            protocol.ReplicaSynced(cell=Cell(0, 0), replica=f"invented-{number}"),
            protocol.CellFinished(cell=Cell(number + 5, 0), digest="d"),
            protocol.StepCommitted(
                step=10**6 + number, generation=0, loss=1.0, gradient_norm=1.0, microbatches=4, seconds=1.0
            ),
        ):
            for worker in sorted(before.workers):
                world.tell(Received(worker, message))
    after = world.state
    assert (after.synced, after.finished, after.step) == (before.synced, before.finished, before.step)


def test_a_loss_that_is_not_finite_ends_the_job() -> None:
    world = World(2, 1, 0)
    world.settle()
    message = protocol.StepCommitted(
        step=world.state.step, generation=0, loss=None, gradient_norm=None, microbatches=8, seconds=0.0
    )
    world.tell(Received("w0", message))
    assert world.finish is not None
    assert world.finish.reason == "LossNotFinite"


def test_a_notice_that_is_withdrawn_changes_nothing_more() -> None:
    world = World(3, 1, 0)
    world.settle()
    world.tell(PreemptionNotice("w1", 1e9))
    world.tell(NoticeWithdrawn("w1"))
    world.settle()
    assert world.state.workers["w1"].notice_until is None
    assert world.state.plan is not None
    assert {len(world.state.plan.owned_by(w)) for w in world.state.plan.worker_ids()} <= {0, 1}


def test_only_a_worker_itself_could_take_back_what_it_said() -> None:
    world = World(3, 1, 1)
    world.settle()
    world.tell(PreemptionNotice("w1", 1e9))
    world.tell(Received("w1", protocol.NoticeReceived(seconds=2e9)))
    world.tell(NoticeWithdrawn("w1"))
    world.settle()
    assert world.state.plan is not None
    assert "w1" not in {world.state.plan.at(c).owner for c in world.state.plan.cells()}


def test_heartbeats_and_the_mere_passing_of_time_decide_nothing() -> None:
    world = World(3, 2, 1)
    world.settle()
    assert world.state.steady
    beat = protocol.Heartbeat(step=7, doing="thinking")
    state, commands = coordinator.step(world.state, Received("w1", beat), world.now + 1)
    assert not commands
    assert (state.workers["w1"].seen, state.workers["w1"].doing) == (world.now + 1, "thinking")
    assert coordinator.step(state, Tick(), world.now + 1)[0] is state
    assert not coordinator.step(state, PreemptionNotice("w1", 60), world.now + 1)[0].steady


def test_a_later_notice_can_only_shorten_the_time() -> None:
    world = World(3, 1, 1)
    world.settle()
    world.tell(PreemptionNotice("w1", 120))
    until = world.state.workers["w1"].notice_until
    world.tell(PreemptionNotice("w1", 500))
    assert world.state.workers["w1"].notice_until == until
    world.tell(PreemptionNotice("w1", 30))
    assert world.state.workers["w1"].notice_seconds == 30
    assert world.state.preemptions == 1


def test_what_is_given_back_is_no_preemption() -> None:
    world = World(3, 1, 1)
    world.settle()
    world.tell(PreemptionNotice("w1", 3600, wanted=True))
    world.settle()
    assert (world.state.preemptions, world.state.notices) == (0, 0)
    assert world.state.plan is not None
    assert not world.state.plan.owned_by("w1")


def test_a_notice_shorter_than_a_step_does_not_wait_for_its_end() -> None:
    world = World(3, 1, 0)
    world.settle()
    world.tell(PreemptionNotice("w1", 0.05))
    assert world.state.plan is not None
    assert world.state.plan.reason == "PlannedTakeover"
    assert not world.state.plan.boundary


def test_a_job_that_stands_still_says_who_waits_for_what() -> None:
    world = World(2, 1, 0)
    world.settle()
    world.now += 2000
    for worker in world.state.workers:
        world.tell(Received(worker, protocol.Heartbeat(step=1, doing="waiting for rain")))
    world.tell(Tick())
    assert world.finish is not None
    assert world.finish.reason == "ProgressDeadlineExceeded"
    assert "w1 is waiting for rain" in world.finish.message


def test_a_split_that_the_manifest_gives_is_that_of_every_plan() -> None:
    """After a takeover and after healing, too; a plan with another one is not of this job."""
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
    """The model has 8 layers."""
    world = World(stages, 1, 0, split=split)
    while len(world.pending) > 2:
        world.pending.pop()  # only the first one comes, and is ready
    while world.finish is None and world.pending:
        world.deliver()
    assert world.finish is not None
    assert (world.finish.outcome, world.finish.reason) == (Outcome.FAILED, "InvalidTopology")
    assert "spec.topology." in world.finish.message
    assert "8 layers" in world.finish.message
    assert list(world.state.workers) == ["w0"]


def test_a_view_for_which_no_plan_was_better_is_not_planned_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with notice stays for a while: ten ticks a second, and all that is heard, would plan in vain."""
    world = World(4, 2, 0)
    world.settle()
    victim = sorted(world.state.workers)[0]
    world.tell(PreemptionNotice(victim, 120.0))
    world.settle()
    assert not world.state.steady
    asked = []

    def noted(view: PlanningView) -> Plan | None:
        asked.append(view)
        return improve(view)

    monkeypatch.setattr(planner, "improve", noted)
    for _ in range(20):
        world.tell(Tick())
    assert not asked
    spare = protocol.Hello(worker="spare", host="h", port=1)
    world.tell(WorkerJoined(spare))
    world.tell(Received("spare", protocol.WorkerReady()))
    assert asked


def test_a_state_is_changed_as_a_dataclass_is_replaced() -> None:
    world = World(2, 1, 0)
    world.settle()
    state = world.state
    assert changed(state, {"step": 7, "gone": frozenset({"w"})}) == replace(state, step=7, gone=frozenset({"w"}))
    assert state.step != 7
    with pytest.raises(TypeError, match="CoordinatorState has no stepp"):
        changed(state, {"stepp": 7})
    with pytest.raises(FrozenInstanceError):
        state.step = 7  # type: ignore[misc]
