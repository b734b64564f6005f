"""Simulated workers around the real coordinator, for tests of its decisions."""

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control import protocol
from bamboo_core.control.platform import Platform
from bamboo_core.control.protocol import Received, WorkerJoined
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import (
    AddWorkers,
    Emit,
    Finish,
    RequestsWithdrawn,
    Send,
    SpecChanged,
    Tick,
    WorkerLost,
)
from bamboo_core.coordinator.records.workers import Workers
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.coordinator.workers.membership import surplus_requests
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import gives_back
from bamboo_core.planning.plan import Cell, Plan, plan_problems
from manifest_kit import bamboojob, training
from played_job import PlayedJob


def held(plan: Plan, worker: str, cut: CheckpointId) -> protocol.StateHeld:
    """Return a worker's report that it holds copies of a cut: all layers of the stages that it owns or replicates."""
    stages = [plan.stages[cell.stage] for cell in plan.cells() if worker in plan.at(cell).holders]
    layers = sorted({layer for ends in stages for layer in range(*ends)})
    return protocol.StateHeld(checkpoint=cut, layers=tuple(layers))


def taken_over(plan: Plan, cell: Cell) -> protocol.TakenOver:
    """Return the report with which a cell's new owner says that it has caught up."""
    return protocol.TakenOver(
        epoch=plan.epoch, cell=cell, step=0, reform_ms=1.0, recompute_ms=1.0, forwards=1, backwards=1
    )


class World(PlayedJob):
    """Simulated workers around the real coordinator. Their answers wait in `pending` until the test delivers them.

    chooses: which of "stages" and "pipelines" the manifest leaves to the coordinator. elastic (only with `chooses`):
    fields of `spec.elastic` that add to or replace `maxWorkers` (stages * pipelines) and `stabilizationSeconds` (0).
    """

    def __init__(
        self,
        stages: int,
        pipelines: int,
        standby: int,
        split: list[int] | None = None,
        *,
        steps: int = 10_000,
        chooses: tuple[str, ...] = (),
        checkpoint: dict[str, Any] | None = None,
        platforms: dict[str, Platform] | None = None,
        redundancy: dict[str, Any] | None = None,
        compiled: bool = False,
        per_node: int = 1,
        elastic: dict[str, Any] | None = None,
        schedule: str | None = None,
        profile: protocol.Profile | None = None,
    ) -> None:
        grid = {"stages": stages, "pipelines": pipelines}
        document = bamboojob(
            "x",
            task={"entrypoint": "a.b:c"},
            training=training(steps, 8, 1, compile=compiled),
            topology={
                **{name: number for name, number in grid.items() if name not in chooses},
                "split": split,
            },
            standby={"workers": standby},
            spread={"workersPerNode": per_node},
        )
        if chooses:
            bounds = {"maxWorkers": stages * pipelines, "stabilizationSeconds": 0}
            document["spec"]["elastic"] = bounds | (elastic or {})
        if checkpoint is not None:
            document["spec"]["checkpoint"] = {"storage": "memory://x", **checkpoint}
        if schedule is not None:
            document["spec"]["topology"]["schedule"] = schedule
        document["spec"]["redundancy"] = redundancy or {}
        self.profile = profile or protocol.Profile(costs=(1.0,) * 8)
        self.platforms = platforms or {}  # of workers by name
        self.per_node = per_node  # how many workers share a node; workers fill one node after another
        self.found: protocol.CheckpointFound | None = protocol.CheckpointFound(number=0)  # the answer to a search
        self.sent: list[tuple[str, Any]] = []  # messages about checkpoints, each with the worker that gets it
        self.stops: list[protocol.Stop] = []
        self.told: list[Emit] = []
        self.away = 0  # number of workers that do not come when they are next requested
        self.unmade = 0  # requested workers that have not come
        self.document, self.spec = document, parse_manifest(document)
        self.state = coordinator.initial(self.spec, document, secret="", now=0.0)
        self.now, self.count = 0.0, 0
        self._calm: CoordinatorState | None = None  # the last state that check_calm has checked
        self.finish: Finish | None = None
        self.plans: list[Plan] = []
        self.lost: set[str] = set()
        self.pending: deque[Any] = deque()
        self.tell(Tick())

    def wait(self, until: Callable[[], bool], turns: int = 2000) -> None:
        """Let 0.3 s pass, then deliver the next message, else a Tick; repeat until `until()`, at most `turns` times."""
        for _ in range(turns):
            if until():
                return
            self.now += 0.3
            self.deliver() if self.pending else self.tell(Tick())

    def check_calm(self) -> None:
        """Check that a Tick changes nothing, after 0.1 s and after an hour, if no decision is due (`plans.steady`)."""
        state = self.state
        waits = state.checkpoints.writers or state.ending.stopping
        waits = waits or gives_back(state.spec)  # the coordinator checks this each second
        if not state.plans.steady or state.phase != "Running" or waits:
            return
        if (calm := self._as_heard(0.0)) == self._calm:
            return  # nothing but heartbeats since
        self._calm = calm
        for seconds in (0.1, 3600.0):
            now = self.now + seconds
            state = self._as_heard(now)
            after, commands = coordinator.step(state, Tick(), now)
            assert not commands
            assert after == replace(state, plans=replace(state.plans, steady=True))

    def _as_heard(self, now: float) -> CoordinatorState:
        """Return the state with heartbeats and progress at `now`, and without link reports and `plans.steady`."""
        workers = {w: replace(r, seen=now, cut_since=None) for w, r in self.state.workers.items()}
        return replace(
            self.state,
            workers=Workers(workers),
            progress=replace(self.state.progress, last_at=now),
            plans=replace(self.state.plans, steady=False),
            liveness=replace(self.state.liveness, links={}),
        )

    def tell(self, event: object) -> None:
        self.now += 0.01
        before = self.state
        self.state, commands = coordinator.step(self.state, event, self.now)  # type: ignore[arg-type]
        if not (isinstance(event, Received) and isinstance(event.message, protocol.Heartbeat)):  # most are
            assert coordinator.step(before, event, self.now) == (self.state, commands)  # type: ignore[arg-type]
        self.check_calm()
        for command in commands:
            match command:
                case AddWorkers(count):
                    here = max(0, count - self.away)
                    self.away = max(0, self.away - count)
                    self.unmade += count - here
                    for _ in range(here):
                        name, platform = f"w{self.count}", self.platforms.get(f"w{self.count}", Platform())
                        hello = protocol.Hello(
                            worker=name,
                            host="h",
                            port=1,
                            zone=f"z{self.count // self.per_node % 3}",
                            node=f"n{self.count // self.per_node}" if self.per_node > 1 else "",
                            platform=platform,
                        )
                        self.pending.append(WorkerJoined(hello))
                        self.pending.append(Received(f"w{self.count}", protocol.WorkerReady()))
                        self.count += 1
                case Send(worker, protocol.ProfileRequest()):
                    self.pending.append(Received(worker, self.profile))
                case Send(worker, protocol.ReportRequest()):
                    report = protocol.Report(committed=self.state.step - 1, held={})
                    self.pending.append(Received(worker, report))
                case Send(worker, protocol.HoldState(checkpoint=cut)):
                    self.pending.append(Received(worker, held(self.plan, worker, cut)))
                case Send(worker, protocol.SendPlan(plan=plan)):
                    self.check(plan)
                    self.pending.append(Received(worker, protocol.PlanApplied(epoch=plan.epoch)))
                    self.pending += [Received(worker, taken_over(plan, cell)) for cell in self.moved(plan, worker)]
                    for cell in plan.owned_by(worker):
                        for replica in plan.at(cell).replicas:
                            self.pending.append(Received(worker, protocol.ReplicaSynced(cell=cell, replica=replica)))
                case Send(worker, protocol.FindCheckpoint() as message):
                    self.sent.append((worker, message))
                    if self.found:
                        self.pending.append(
                            Received(worker, msgspec.structs.replace(self.found, number=message.number))
                        )
                case Send(
                    worker,
                    protocol.TakeCheckpoint()
                    | protocol.KeepLastState()
                    | protocol.CommitCheckpoint()
                    | protocol.DropCopies() as message,
                ):
                    self.sent.append((worker, message))
                case Send(_, protocol.Stop() as message):
                    self.stops.append(message)
                case Send(worker, protocol.Refused()):
                    self.lost.add(worker)
                case Emit():
                    self.told.append(command)
                case Finish():
                    self.finish = command

    def moved(self, plan: Plan, worker: str) -> list[Cell]:
        """Return the cells that `plan` moves to this worker; none if it is not the newest plan or has a new origin."""
        if plan is not self.plans[-1] or len(self.plans) < 2:
            return []
        old = self.plans[-2]
        if old.origin != plan.origin:
            return []
        mine = [c for c in plan.owned_by(worker) if c.pipeline < len(old.pipelines)]
        return [c for c in mine if old.at(c).owner != worker]

    def check(self, plan: Plan) -> None:
        assert plan_problems(plan) == []
        if self.plans and plan is not self.plans[-1]:
            old = self.plans[-1]
            assert plan.epoch == old.epoch + 1
            holders = {
                number: {w for c in old.cells() if c.stage == number for w in old.at(c).holders}
                for number in range(len(old.stages))
            }
            for cell in plan.cells() if plan.epoch > plan.origin else []:
                assert plan.at(cell).owner in holders[cell.stage], "ownership moved to a stranger"
        if not self.plans or plan is not self.plans[-1]:
            self.plans.append(plan)
        assert not plan.worker_ids() & self.lost, "a plan names a lost worker"

    def settle(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if self.finish or (self.state.phase == "Restoring" and not self.pending):
                return
            if not self.pending and self.state.inquiry.began_at is not None:
                self.now += 0.3
                self.tell(Tick())
                continue
            if not self.pending:
                before = (self.state.plan, len(self.state.workers))
                if self.state.plan:
                    self.commit()
                if not self.pending and before == (self.state.plan, len(self.state.workers)):
                    return
                continue
            self.deliver()
        raise AssertionError("the coordinator does not come to rest")

    def commit(self, checkpoint: tuple[int, CheckpointId] | None = None, *, skipped: bool = False) -> None:
        """Let the root commit the next step. checkpoint: (number of the request, id) if the step's state is saved."""
        plan = self.state.plan
        assert plan is not None
        message = protocol.StepCommitted(
            step=self.state.step,
            generation=plan.target.generation,
            loss=None if skipped else 1.0,
            gradient_norm=None if skipped else 1.0,
            microbatches=8,
            seconds=0.1,
            checkpoint=checkpoint,
            skipped=skipped,
        )
        self.tell(Received(plan.at(Cell(0, 0)).owner, message))

    def deliver(self) -> None:
        event = self.pending.popleft()
        name = event.hello.worker if isinstance(event, WorkerJoined) else event.worker
        if name not in self.lost:
            self.tell(event)

    def withdraw(self) -> None:
        """Withdraw the requested workers that have not come and are no longer needed."""
        if count := min(self.unmade, surplus_requests(self.state)):
            self.unmade -= count
            self.tell(RequestsWithdrawn(count))

    def edit(self, **sections: dict[str, Any]) -> None:
        """Replace fields of these sections of the manifest, and report the new spec to the coordinator."""
        spec = self.document["spec"]
        changed = {name: {**spec.get(name, {}), **values} for name, values in sections.items()}
        self.document = {**self.document, "spec": {**spec, **changed}}
        self.spec = parse_manifest(self.document)
        self.tell(SpecChanged(self.spec))

    def lose(self, worker: str) -> None:
        self.lost.add(worker)
        self.tell(WorkerLost(worker, "test"))


def silence(world: World, silent: set[str], seconds: float) -> None:
    """Let `seconds` pass with heartbeats from all workers but the silent ones."""
    until = world.now + seconds
    while world.now < until:
        world.now += 0.5
        for worker in sorted(world.state.workers.keys() - silent):
            world.tell(Received(worker, protocol.Heartbeat(step=1)))
        world.tell(Tick())


def restarted(world: World) -> Plan:
    """Replace the coordinator by a new one that knows no plan, and return the workers' plan."""
    world.settle()
    plan = world.state.plan
    assert plan is not None
    begun = coordinator.initial(world.spec, world.document, secret="", now=world.now, resumed=True)
    world.state = replace(begun, membership=replace(begun.membership, requested=len(plan.worker_ids())))
    return plan


def back(world: World, worker: str, plan: Plan) -> None:
    """Let a worker reconnect to a restarted coordinator, with its plan."""
    world.tell(WorkerJoined(protocol.Hello(worker=worker, host="h", port=1, plan=plan)))
    world.tell(Received(worker, protocol.WorkerReady()))
    world.tell(Received(worker, protocol.PlanApplied(epoch=plan.epoch)))
