"""Plans and the coordinator: tables for the pure functions, Hypothesis for the invariants."""

import itertools
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo import coordinator, protocol
from bamboo.events import (
    AddWorkers,
    ChannelClosed,
    Finish,
    Notice,
    NoticeWithdrawn,
    Outcome,
    Received,
    Send,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from bamboo.grid import initial_plan, ring, shadow_of, split_layers, split_microbatches
from bamboo.manifest import parse_manifest
from bamboo.plan import Cell, Peer, Plan, plan_problems
from bamboo.reconcile import protected
from bamboo.spec import RedundancyMode


def peer(name: str, zone: str = "") -> Peer:
    return Peer(worker=name, host="h", port=1, zone=zone)


@pytest.mark.parametrize(
    ("costs", "stages", "expected"),
    [
        ([1, 1, 1, 1], 2, ((0, 2), (2, 4))),
        ([4, 1, 1, 1, 1], 2, ((0, 1), (1, 5))),
        ([1, 1, 1, 1, 4], 2, ((0, 4), (4, 5))),
        ([1, 2, 3], 3, ((0, 1), (1, 2), (2, 3))),
        ([5], 1, ((0, 1),)),
    ],
)
def test_layers_are_split_evenly_by_cost(costs: list[float], stages: int, expected: object) -> None:
    assert split_layers(costs, stages) == expected


def test_more_stages_than_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="at most the model's 2 layers, got 3"):
        split_layers([1, 1], 3)


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=7), st.integers(1, 7))
def test_no_split_has_a_cheaper_worst_stage(costs: list[float], stages: int) -> None:
    if stages > len(costs):
        return
    got = split_layers(costs, stages)

    def best(start: int, left: int) -> float:
        if left == 1:
            return sum(costs[start:])
        return min(max(sum(costs[start:end]), best(end, left - 1)) for end in range(start + 1, len(costs) - left + 2))

    assert max(sum(costs[a:b]) for a, b in got) == pytest.approx(best(0, stages))


@given(st.integers(1, 64), st.integers(1, 8))
def test_microbatches_are_shared_out_exactly_once(microbatches: int, pipelines: int) -> None:
    shares = split_microbatches(microbatches, pipelines)
    assert [m for share in shares for m in share] == list(range(microbatches))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=12))
def test_neighbours_sit_in_different_zones_where_possible(zones: list[str]) -> None:
    order = ring([peer(f"w{i}", z) for i, z in enumerate(zones)], len(zones))
    most = max(zones.count(z) for z in set(zones))
    clashes = sum(a.zone == b.zone for a, b in itertools.pairwise(order))
    assert len({p.worker for p in order}) == len(zones)
    assert clashes <= max(0, most - 1 - (len(zones) - most))


def test_the_shadow_is_the_nearest_other_predecessor() -> None:
    assert shadow_of(["a", "b", "c"], 0) == "c"
    assert shadow_of(["a", "b", "b"], 2) == "a"
    assert shadow_of(["a", "a"], 1) is None


def test_problems_of_a_plan_are_named() -> None:
    plan = initial_plan([peer("a"), peer("b")], ((0, 1), (1, 2)), 1, 4, RedundancyMode.LAZY_FORWARD)
    assert plan_problems(plan) == []
    import msgspec

    broken = msgspec.structs.replace(plan, workers=(peer("a"),), stages=((0, 1), (2, 3)))
    assert len(plan_problems(broken)) == 3


class World:
    """Model workers around the real coordinator: they obey plans after a while, sync replicas, commit steps."""

    def __init__(
        self, stages: int, pipelines: int, standby: int, least: int | None = None, most: int | None = None
    ) -> None:
        document: dict[str, Any] = {
            "apiVersion": "bamboo.dev/v1alpha1",
            "kind": "BambooJob",
            "metadata": {"name": "x"},
            "spec": {
                "task": {"entrypoint": "a.b:c"},
                "training": {"steps": 10_000, "globalBatchSize": 8, "microBatchSize": 1},
                "topology": {"stages": stages, "pipelines": pipelines},
                "standby": {"workers": standby},
                "elastic": {
                    "minPipelines": least or pipelines,
                    "maxPipelines": most or pipelines,
                    "stabilizationSeconds": 0,
                },
            },
        }
        self.away = 0  # workers that are asked for and do not come
        self.document, self.spec = document, parse_manifest(document)
        self.state = coordinator.initial(self.spec, document, secret="", save_path=None, now=0.0)
        self.now, self.count = 0.0, 0
        self.finish: Finish | None = None
        self.plans: list[Plan] = []
        self.lost: set[str] = set()
        self.pending: deque[Any] = deque()
        self.held: dict[str, dict[int, int]] = {}  # what workers say that they hold, stage by stage
        self.tell(Tick())

    def tell(self, event: object) -> None:
        self.now += 0.01
        before = self.state
        self.state, commands = coordinator.step(self.state, event, self.now)  # type: ignore[arg-type]
        assert coordinator.step(before, event, self.now) == (self.state, commands)  # type: ignore[arg-type]
        for command in commands:
            match command:
                case AddWorkers(count):
                    here = max(0, count - self.away)
                    self.away = max(0, self.away - count)
                    for _ in range(here):
                        hello = protocol.Hello(worker=f"w{self.count}", host="h", port=1, zone=f"z{self.count % 3}")
                        self.pending.append(WorkerJoined(hello))
                        self.pending.append(Received(f"w{self.count}", protocol.WorkerReady()))
                        self.count += 1
                case Send(worker, protocol.ProfileRequest()):
                    self.pending.append(Received(worker, protocol.Profile(costs=(1.0,) * 8)))
                case Send(worker, protocol.ReportRequest()):
                    report = protocol.Report(committed=self.state.step - 1, held=self.held.get(worker, {}))
                    self.pending.append(Received(worker, report))
                case Send(worker, protocol.SendPlan(plan=plan)):
                    self.check(plan)
                    self.pending.append(Received(worker, protocol.PlanApplied(epoch=plan.epoch)))
                    for cell in plan.owned_by(worker):
                        for replica in plan.at(cell).replicas:
                            self.pending.append(Received(worker, protocol.ReplicaSynced(cell=cell, replica=replica)))
                case Finish():
                    self.finish = command

    def check(self, plan: Plan) -> None:
        assert plan_problems(plan) == []
        if self.plans and plan is not self.plans[-1]:
            old = self.plans[-1]
            assert plan.epoch == old.epoch + 1
            stage_holders = {
                s: {w for d in range(len(old.pipelines)) for w in old.at(Cell(d, s)).holders}
                for s in range(len(old.stages))
            }
            for cell in plan.cells():
                assert plan.at(cell).owner in stage_holders[cell.stage], "ownership moved to a stranger"
        if not self.plans or plan is not self.plans[-1]:
            self.plans.append(plan)
        assert not plan.worker_ids() & self.lost, "a plan names a lost worker"

    def settle(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if self.finish:
                return
            if not self.pending and self.state.asked_at is not None:
                self.now += 0.3
                self.tell(Tick())
                continue
            if not self.pending:
                step, plan = self.state.step, self.state.plan
                message = protocol.StepCommitted(
                    step=step,
                    generation=plan.target.generation if plan else 0,
                    loss=1.0,
                    gradient_norm=1.0,
                    microbatches=8,
                    seconds=0.1,
                )
                before = (self.state.plan, len(self.state.workers))
                if self.state.plan:
                    self.tell(Received(self.state.plan.at(Cell(0, 0)).owner, message))
                if not self.pending and before == (self.state.plan, len(self.state.workers)):
                    return
                continue
            self.deliver()
        raise AssertionError("the coordinator does not come to rest")

    def deliver(self) -> None:
        event = self.pending.popleft()
        name = event.hello.worker if isinstance(event, WorkerJoined) else event.worker
        if name not in self.lost:
            self.tell(event)

    def restart(self, dead: tuple[str, ...] = ()) -> None:
        """The coordinator forgets everything; its workers come back and report, but for those that died meanwhile."""
        old = self.state
        self.pending.clear()
        self.lost |= set(dead)
        self.state = coordinator.initial(self.spec, self.document, secret="", save_path=None, now=self.now)
        plan = old.plan
        assert plan is not None
        for worker in [w for w in old.workers if w not in dead]:
            known = plan if worker in plan.worker_ids() else None
            self.tell(WorkerJoined(protocol.Hello(worker=worker, host="h", port=1, plan=known)))
            self.tell(Received(worker, protocol.WorkerReady()))
            self.tell(Received(worker, protocol.PlanApplied(epoch=plan.epoch)))
            if plan.owned_by(worker) and Cell(0, 0) in plan.owned_by(worker):
                message = protocol.StepCommitted(
                    step=old.step - 1,
                    generation=plan.target.generation,
                    loss=1.0,
                    gradient_norm=1.0,
                    microbatches=8,
                    seconds=0.0,
                )
                self.tell(Received(worker, message))
            for cell, replica in old.synced:
                if plan.at(cell).owner == worker:
                    self.tell(Received(worker, protocol.ReplicaSynced(cell=cell, replica=replica)))
            self.held[worker] = {c.stage: old.step - 1 for c in plan.cells() if worker in plan.at(c).holders}

    def lose(self, worker: str) -> None:
        self.lost.add(worker)
        self.tell(WorkerLost(worker, "test"))


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
            world.tell(Notice(worker, 1e9))
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
            assert protected(plan, world.state.synced, cell), f"{cell} is unprotected at rest"


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


@pytest.mark.parametrize("dead", [(), ("w1",), ("w0",), ("w4", "w1")])
def test_a_restarted_coordinator_goes_on_where_it_was(dead: tuple[str, ...]) -> None:
    world = World(4, 1, 1)
    world.settle()
    old = world.state
    world.restart(dead)
    if dead:
        assert world.state.phase == "Recovering"
        world.now += 11
        for worker in world.state.workers:
            world.tell(Received(worker, protocol.Heartbeat(step=1)))
        world.tell(Tick())
    assert world.state.phase == "Running"
    assert old.plan is not None
    assert world.state.plan is not None
    if not dead:
        assert world.state.plan == old.plan
        assert world.state.synced == old.synced
    world.settle()
    assert world.finish is None
    assert world.state.step > old.step or dead
    assert all(len(world.state.plan.owned_by(w)) <= 1 for w in world.state.workers)


def test_a_restarted_coordinator_refuses_those_that_the_newest_plan_does_not_know() -> None:
    world = World(2, 1, 1)
    world.settle()
    old = world.state.plan
    assert old is not None
    world.lose("w2")
    world.lost.clear()
    world.settle()
    newest = world.state.plan
    world.state = coordinator.initial(world.spec, world.document, secret="", save_path=None, now=world.now)
    world.tell(WorkerJoined(protocol.Hello(worker="w2", host="h", port=1, plan=old)))
    world.tell(Received("w2", protocol.WorkerReady()))
    assert newest is not None
    for worker in newest.worker_ids():
        world.tell(WorkerJoined(protocol.Hello(worker=worker, host="h", port=1, plan=newest)))
        world.tell(Received(worker, protocol.WorkerReady()))
    assert world.state.phase == "Running"
    assert "w2" not in world.state.workers
    assert "w2" in world.state.gone


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
    world.tell(Notice("w1", 1e9))
    world.tell(NoticeWithdrawn("w1"))
    world.settle()
    assert world.state.workers["w1"].notice_until is None
    assert world.state.plan is not None
    assert {len(world.state.plan.owned_by(w)) for w in world.state.plan.worker_ids()} <= {0, 1}


def test_a_notice_shorter_than_a_step_does_not_wait_for_its_end() -> None:
    world = World(3, 1, 0)
    world.settle()
    world.tell(Notice("w1", 0.05))
    assert world.state.plan is not None
    assert world.state.plan.reason == "PlannedTakeover"
    assert not world.state.plan.boundary
