"""A job's coordinator and pod controller with a fake API server, whose pods run no processes."""

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

import kueue_manager
from bamboo_core.control.protocol import (
    Hello,
    Message,
    PlanApplied,
    Profile,
    Received,
    ReplicaSynced,
    StepCommitted,
    WorkerJoined,
    WorkerReady,
)
from bamboo_core.coordinator.events import SpecChanged
from bamboo_core.job.spec import JobSpec
from bamboo_core.kube.errors import ApiError, ClusterUnreachable
from bamboo_core.names import TRAINER_CONTAINER
from bamboo_core.planning.plan import Cell, Plan
from bamboo_operator.cluster.indices import ClusterIndices
from bamboo_operator.jobs import coordinator_runner as runner_module
from bamboo_operator.jobs.coordinator_runner import TICK_SECONDS, CoordinatorRunner, TrainingRun
from bamboo_operator.jobs.reconcile_schedule import ReconcileTrigger
from bamboo_operator.kube.objects import JobIdentity, utc_now
from bamboo_operator.manifests.worker_pod import WorkerPodSettings, worker_pool
from bamboo_operator.pods import controller as controller_module
from bamboo_operator.pods import disruption_budget as budget_module
from bamboo_operator.pods import view as pods_module
from bamboo_operator.pods.controller import PodController
from bamboo_operator.pods.queueing import QuotaHolders
from bamboo_operator.pods.starting import UNSCHEDULABLE
from bamboo_operator.pods.view import JobPods
from bamboo_operator.signals.node_marks import NodeMark
from fake_api import FakeApi
from operator_kit import JOB_UID, SETTINGS, job
from opsim_budgets import disruptions_allowed, is_about
from opsim_kopf import pod_event, shared_for

BEGINNING = 10_000.0  # the time at which a test begins, in seconds


class Place:
    """A fake API server with a quota of pods (`room`), and its watch. Only the test gives pods nodes and runs them."""

    def __init__(self) -> None:
        self.cluster, self.room, self.made = ClusterIndices(), 100, 0
        self.api = FakeApi()
        self.deleted: list[str] = []
        self.meanwhile: Callable[[], None] = lambda: None  # called after a pod is stored, before the answer
        self.shown = True  # whether the watch reports new pods, and pods that are being deleted
        self.refusal: ApiError | None = None  # the answer to every creation of a pod
        self.unanswered = 0  # how many of the next pods are created although the client gets no answer
        self.budget: dict[str, Any] | None = None
        self.budgets: list[int | None] = []  # minAvailable of each budget, in order; None: deleted
        self.policies: list[dict[str, Any]] = []  # as they were written
        self.no_budgets = False  # whether the operator lacks the right to create budgets
        self.invalid = ""  # why a dry run of a pod fails
        self.kubelets = True  # whether deleted pods disappear at once
        self.events: dict[str, list[dict[str, Any]]] = {}  # of pods, by their uids
        self.events_read: list[str] = []  # the uids of pods whose events the operator has listed
        self.no_events = False  # whether the operator lacks the right to list events
        self.kueue = False  # whether pods are created through Kueue's webhook
        self.holders = QuotaHolders()
        self.passed = 0.0  # seconds added to the coordinators' clock

    @property
    def pods(self) -> dict[str, dict[str, Any]]:
        return self.api.all("pods")

    async def create_pod(self, pod: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        self.api.refuse_taken("pods", pod["metadata"]["name"])
        if self.refusal is not None:
            raise self.refusal
        if len(self.pods) >= self.room:
            raise ApiError(403, "Forbidden", "exceeded quota: pods")
        self.made += 1
        made = self.put(kueue_manager.defaulted(pod) if self.kueue else pod, f"uid-{self.made}")
        self.meanwhile()
        if self.unanswered:
            self.unanswered -= 1
            raise ClusterUnreachable("no answer")
        return copy.deepcopy(made)

    async def try_pod(self, pod: dict[str, Any]) -> None:
        if self.invalid:
            raise ApiError(422, "Invalid", self.invalid)
        if len(self.pods) >= self.room:
            raise ApiError(403, "Forbidden", "exceeded quota: pods")

    async def read_pod(self, namespace: str, name: str) -> dict[str, Any]:
        return self.api.read("pods", name)

    def put(self, pod: dict[str, Any], uid: str, age: float = 0.0) -> dict[str, Any]:
        made = (datetime.now(UTC) - timedelta(seconds=age)).isoformat()
        pod = copy.deepcopy(pod)
        pod["metadata"] |= {"uid": uid, "creationTimestamp": made}
        if pod["spec"].get("schedulingGates"):
            condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
            pod["status"] = {"phase": "Pending", "conditions": [condition]}
        pod = self.api.put("pods", pod)
        if self.shown:
            pod_event(self.cluster, "ADDED", pod)
        return pod

    def take(self, name: str) -> None:
        """Remove the pod, and report that to the watch, as after a deletion by a user."""
        pod_event(self.cluster, "DELETED", self.pods.pop(name))

    def open_gate(self, name: str) -> None:
        """Remove the pod's scheduling gates; its status keeps the reason SchedulingGated until the test changes it."""
        del self.pods[name]["spec"]["schedulingGates"]
        pod_event(self.cluster, "MODIFIED", self.pods[name])

    async def delete_pod(self, namespace: str, name: str, uid: str) -> bool:
        if name not in self.pods:
            return False
        assert self.pods[name]["metadata"]["uid"] == uid
        self.deleted.append(name)
        if self.kubelets:
            self.take(name)
        elif self.shown:
            self.mark(name)
        return True

    def mark(self, name: str, seconds: float = 30.0) -> None:
        """Mark the pod as being deleted, with a grace period that ends in `seconds`."""
        end = datetime.now(UTC) + timedelta(seconds=seconds)
        self.pods[name]["metadata"] |= {"deletionTimestamp": end.isoformat(), "deletionGracePeriodSeconds": 30}
        pod_event(self.cluster, "MODIFIED", self.pods[name])

    def run(self, name: str, age: float) -> None:
        """Give a worker's pod a node on which its container has run for `age` seconds."""
        began = (datetime.now(UTC) - timedelta(seconds=age)).isoformat()
        state = {"name": TRAINER_CONTAINER, "state": {"running": {"startedAt": began}}}
        self.pods[name]["spec"]["nodeName"] = f"node-of-{name}"
        self.pods[name]["status"] = {"phase": "Running", "containerStatuses": [state]}
        pod_event(self.cluster, "MODIFIED", self.pods[name])

    def end(self, name: str, code: int) -> None:
        """End a worker's container with an exit code."""
        terminated = {"exitCode": code, "finishedAt": datetime.now(UTC).isoformat()}
        state = {"name": TRAINER_CONTAINER, "state": {"terminated": terminated}}
        self.pods[name]["status"] = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [state]}
        pod_event(self.cluster, "MODIFIED", self.pods[name])

    def find_no_node(self, name: str) -> None:
        """Let the scheduler report that no node fits the pod."""
        condition = {"type": "PodScheduled", "status": "False", "reason": UNSCHEDULABLE, "message": "0/3 nodes"}
        self.pods[name]["status"] = {"phase": "Pending", "conditions": [condition]}
        pod_event(self.cluster, "MODIFIED", self.pods[name])

    def stall(self, name: str, reason: str) -> None:
        """Give the pod a node on which its container waits, with this reason."""
        state = {"name": TRAINER_CONTAINER, "state": {"waiting": {"reason": reason}}}
        self.pods[name]["spec"]["nodeName"] = f"node-of-{name}"
        self.pods[name]["status"] = {"phase": "Pending", "containerStatuses": [state]}
        pod_event(self.cluster, "MODIFIED", self.pods[name])

    async def pod_events(self, namespace: str, uid: str) -> list[dict[str, Any]]:
        if self.no_events:
            raise ApiError(403, "Forbidden", "may not list events")
        self.events_read.append(uid)
        return copy.deepcopy(self.events.get(uid, []))

    async def apply_network_policy(self, policy: dict[str, Any]) -> None:
        self.policies.append(policy)

    async def apply_disruption_budget(self, budget: dict[str, Any]) -> None:
        if self.no_budgets:
            raise ApiError(403, "Forbidden", "may not patch poddisruptionbudgets")
        self.budget = budget["spec"]
        self.budgets.append(budget["spec"]["minAvailable"])

    async def delete_disruption_budget(self, namespace: str, name: str) -> None:
        self.budgets.append(None)

    def about(self) -> set[str]:
        """Return the names of the pods that the last applied disruption budget selects, even if it has been deleted."""
        return {name for name, pod in self.pods.items() if self.budget and is_about(self.budget, pod)}

    def allowed(self) -> int:
        """Return the number of pods that may be evicted now under the last applied disruption budget."""
        assert self.budget is not None
        return disruptions_allowed(self.budget, self.pods.values())

    def pools(self) -> dict[str, str | None]:
        return {name: worker_pool(pod) for name, pod in sorted(self.pods.items())}


class Job:
    """A job's coordinator and pod controller. now: the controller's time in seconds, which the test advances."""

    def __init__(
        self,
        place: Place,
        running: TrainingRun,
        marks: tuple[NodeMark, ...],
        settings: WorkerPodSettings,
    ) -> None:
        self.place, self.now = place, BEGINNING
        shared = shared_for(place, cluster=place.cluster, marks=marks)  # type: ignore[arg-type]
        self.runner = CoordinatorRunner(running, shared, ReconcileTrigger())
        self.pods = JobPods(running.job, place.cluster, place)  # type: ignore[arg-type]
        self.controller = PodController(
            self.pods,
            place,  # type: ignore[arg-type]
            demand=self.runner.demand,
            tell=self.runner.handle,
            forced=self.runner.removal_forced,
            settings=settings,
            record=self.runner.events.append,
            created=0,
            resumed=running.resumed,
            made=0.0,
            holders=place.holders,
        )

    async def reconciles(self, seconds: float = 0.0, count: int = 4) -> None:
        """Advance the controller's time, then reconcile `count` times, ignoring errors of the API server."""
        self.now += seconds
        for _ in range(count):
            with contextlib.suppress(ApiError, ClusterUnreachable):
                await self.controller.reconcile()

    async def ticks(self, seconds: float) -> None:
        """Advance the controller's and the coordinator's time, and let the coordinator tick."""
        self.now += seconds
        self.place.passed += seconds
        await asyncio.sleep(2 * TICK_SECONDS)

    def hear(self, worker: str, *messages: Message, plan: Plan | None = None) -> None:
        """Let the worker join, with `plan` as the newest plan that it knows, and send messages."""
        self.runner.handle(WorkerJoined(Hello(worker=worker, host="10.0.0.1", port=1, plan=plan)))
        for message in messages:
            self.runner.handle(Received(worker, message))

    def train(self) -> None:
        """Let all workers with a pod join and one report a profile, so that the coordinator makes its first plan."""
        for worker in sorted(self.place.pods):
            self.hear(worker, WorkerReady())
        self.runner.handle(Received(self.runner.state.layers.asked or "", Profile(costs=(1.0,) * 4)))
        assert self.runner.state.phase == "Running"

    async def start(self) -> None:
        """Create the job's pods and let their workers run and train; no replica is in step yet."""
        await self.ticks(0.0)
        await self.reconciles()
        self.train()
        for worker in self.place.pods:
            self.place.run(worker, age=1.0)

    def fill(self) -> None:
        """Report every replica of the plan as in step."""
        plan = self._plan()
        for cell in plan.cells():
            for replica in plan.at(cell).replicas:
                self.runner.handle(Received(plan.at(cell).owner, ReplicaSynced(cell=cell, replica=replica)))

    def commit(self) -> None:
        """Let the workers apply the newest plan and commit a step."""
        plan, state = self._plan(), self.runner.state
        for worker in sorted(plan.worker_ids() & state.workers.keys()):
            self.runner.handle(Received(worker, PlanApplied(epoch=plan.epoch)))
        message = StepCommitted(
            step=state.step,
            generation=plan.target.generation,
            loss=1.0,
            gradient_norm=1.0,
            microbatches=state.spec.training.microbatches,
            seconds=0.1,
        )
        self.runner.handle(Received(plan.at(Cell(0, 0)).owner, message))

    def _plan(self) -> Plan:
        assert self.runner.state.plan is not None
        return self.runner.state.plan

    def edit(self, spec: JobSpec) -> None:
        self.runner.tell(SpecChanged(spec))

    def told(self) -> list[str]:
        return [emit.reason for emit in self.runner.events]

    def plan_record(self) -> str | None:
        """Return the plan record that the job's status would get; None if there is none to write."""
        return self.runner.plan_record(self.pods.deleted())

    def problems(self) -> dict[str, str]:
        self.controller.note_problems()
        return {problem.reason: problem.message for problem in self.controller.problems}


@pytest.fixture
async def begin(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Job]]:
    tasks: list[asyncio.Task[None]] = []

    def make(
        place: Place,
        resumed: bool = False,
        known_lost: frozenset[str] = frozenset(),
        counted: frozenset[str] = frozenset(),
        marks: tuple[NodeMark, ...] = (),
        settings: WorkerPodSettings = SETTINGS,
        **spec: Any,
    ) -> Job:
        monkeypatch.setattr(runner_module, "AwakeClock", lambda: lambda: time.monotonic() + place.passed)
        parsed = job(**spec)
        running = TrainingRun(
            job=JobIdentity((parsed.namespace, parsed.name), JOB_UID),
            spec=parsed,
            manifest={},
            resumed=resumed,
            known_lost=known_lost,
            counted=counted,
        )
        made = Job(place, running, marks, settings)
        for module in (runner_module, budget_module, controller_module, pods_module):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
        monkeypatch.setattr(controller_module, "utc_now", lambda: utc_now() + timedelta(seconds=made.now - BEGINNING))
        tasks.append(asyncio.create_task(made.runner.run()))
        return made

    yield make
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(ended, asyncio.CancelledError), ended
