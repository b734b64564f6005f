"""The runner of one BambooJob's coordinator: it feeds events to the coordinator, and executes the resulting commands.

Its loop never waits for the API server. Decisions about the cluster are kept as desired state (pods to create and to
delete, events to post), which the pod controller and the reconciler apply to the cluster.
"""

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

from bamboo_core.control import protocol
from bamboo_core.control.protocol import Received, Stop, WorkerJoined, WorkerWarning
from bamboo_core.control.server import Channels
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.awake_clock import AwakeClock
from bamboo_core.coordinator.events import (
    AddWorkers,
    Command,
    Emit,
    Event,
    Finish,
    Interrupted,
    PreemptionNotice,
    RemoveWorker,
    Send,
    Status,
    Tick,
    WorkerLost,
    WorkersAbsent,
)
from bamboo_core.coordinator.history_feed import HistoryFeed
from bamboo_core.coordinator.job_status import status, wanted_workers
from bamboo_core.coordinator.progress import BEGINNING, EarlierProgress
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.history.files import history_url
from bamboo_core.job.edits import task_digest
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import PlanRecord
from bamboo_core.page.timeline import JobTimeline, StepFigures
from bamboo_core.planning.plan import Plan, WorkerId
from bamboo_operator.auth.pod_tokens import pod_authenticator
from bamboo_operator.jobs.meter import JobMeter, OperatorCounts
from bamboo_operator.jobs.reconcile_schedule import ReconcileTrigger
from bamboo_operator.jobs.shared import SharedResources
from bamboo_operator.kube.objects import JobIdentity, owner_uid
from bamboo_operator.pods.view import PodDemand
from bamboo_operator.signals.worker_watch import WorkerWatch
from bamboo_operator.status.event_queue import EventQueue

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1
LATE_SECONDS = 1.0  # a tick later than this shows that the process or its machine was suspended
URGENT = ("Takeover", "PlannedTakeover")  # reasons of plans that replace a worker that is lost or under notice


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """One training of a job, which a `CoordinatorRunner` runs until the job ends or is suspended.

    resumed: an earlier coordinator began the training, and workers may still train. known_lost: workers whose loss was
    handled before, or whose pods this operator has deleted. counted: workers that must not count as preempted again,
    because an earlier coordinator counted their notice or released them. earlier: the progress before this training.
    """

    job: JobIdentity
    spec: JobSpec
    manifest: dict[str, Any]
    resumed: bool
    known_lost: frozenset[WorkerId] = frozenset()
    counted: frozenset[WorkerId] = frozenset()
    meter: JobMeter = field(default_factory=lambda: JobMeter(OperatorCounts()))
    earlier: EarlierProgress = BEGINNING


class CoordinatorRunner:
    """The runner of a job's coordinator. trigger: wakes the reconciler. finish: the coordinator's command that ends the
    training, also for a suspension; None until then.
    """

    def __init__(self, run: TrainingRun, shared: SharedResources, trigger: ReconcileTrigger) -> None:
        self._run, self._cluster, self._gateway, self._trigger = run, shared.cluster, shared.gateway, trigger
        self._burst = shared.burst
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._watch = WorkerWatch(run.job, shared.cluster, shared.marks, run.meter.signals)
        self._held_messages: list[Send] = []  # until the job's end is in its status
        self._interrupted = self._end_written = False
        self._task = task_digest(run.spec)
        self._due = time.monotonic()
        self._ticker: asyncio.TimerHandle | None = None
        self._clock = AwakeClock()
        self.logging: set[WorkerId] = set()  # workers of an ended job that wait for their loggers
        self.record = JobTimeline()  # for the job's page
        self.events = EventQueue(self.record)
        self.finish: Finish | None = None
        of_another_job = partial(shared.cluster.belongs_to_another_job, *run.job)
        check = pod_authenticator(run.job.key, shared.reviews, self._watch.uid_of, of_another_job)
        self._channels = Channels(self._inbox.put_nowait, shared.gateway.counting_refusals(check))
        self.state: CoordinatorState = coordinator.initial(
            run.spec,
            run.manifest,
            secret=hmac.new(shared.key, run.job.uid.encode(), sha256).hexdigest(),
            now=self._clock(),
            resumed=run.resumed,
            earlier=run.earlier,
            history=history_url(run.spec),
        )
        self._feed = HistoryFeed(secrets.token_hex(4), self.record.now)
        self._status: tuple[CoordinatorState, float, Status] | None = None  # the newest, with its state and time

    def status(self) -> Status:
        """Return the coordinator's current status, cached because a reconciliation asks for it several times."""
        now = self._clock()
        if self._status is None or self._status[0] is not self.state or now - self._status[1] > TICK_SECONDS:
            self._status = (self.state, now, status(self.state, now))
        return self._status[2]

    def demand(self) -> PodDemand:
        """Return the workers that the coordinator wants now, its status, and the workers that have connected to this
        runner.
        """
        return PodDemand(wanted=wanted_workers(self.state), status=self.status(), joined=self.joined)

    def plan_record(self, deleting: Collection[WorkerId]) -> str | None:
        """Return the plan record for the status. Without a plan it holds only lost workers; None if no worker is
        lost, or if an earlier coordinator's record stays in the status.
        deleting: workers whose pods the pod controller has deleted. The record has them and all released workers in
        `counted`, so that another operator counts no preemption at their end, or in `lost` if the plan does not use
        them.
        """
        state, pods = self.state, self._watch.pods().keys()
        holders = state.plan.holders() if state.plan else frozenset()
        released = {worker for worker, record in state.workers.items() if record.released}
        by_order = released | set(deleting)
        lost = frozenset(pods & (self._watch.lost | state.membership.gone | (by_order - holders)))
        if state.plan is None:
            return PlanRecord(lost=lost).written() if lost and not self._run.resumed else None
        notices = state.membership.leaving
        noticed = {w for w in state.noticed if not (notices[w].spared or notices[w].replaced)}
        counted = frozenset(pods & (noticed | state.membership.counted | (by_order & holders)))
        rows = tuple(tuple(assignment.owner for assignment in row) for row in state.plan.pipelines)
        record = PlanRecord(epoch=state.plan.epoch, pipelines=rows, lost=lost, counted=counted, task=self._task)
        return record.written()

    async def run(self) -> None:
        """Handle events until cancelled, also after the end of the job, to stop workers that connect late."""
        self._cluster.add_listener(self._run.job.key, self)
        pods = self._watch.pods()  # from now on the deletion of each of these is reported
        self._watch.begin(self._run.known_lost, resumed=self._run.resumed)
        lost = frozenset(self._watch.lost)
        self.state = coordinator.with_workers(
            self.state, requested=len(pods) - len(lost), gone=lost, counted=self._run.counted
        )
        self._trigger.soon()
        self._gateway.open(self._run.job.key, self._channels)
        try:
            for name in pods:
                self.pod_changed(name)
            self._tick()
            while True:
                self.handle(await self._inbox.get())
        finally:
            self._cluster.remove_listener(self._run.job.key, self)
            if self._ticker is not None:
                self._ticker.cancel()

    async def close(self) -> None:
        """Close the job's channels and its path, so that no worker can connect any more."""
        await self._gateway.close(self._run.job.key, self._channels)

    def tell(self, event: Event) -> None:
        """Queue an event for the coordinator."""
        self._inbox.put_nowait(event)

    @property
    def joined(self) -> Collection[WorkerId]:
        """All workers that have connected to this runner, even if they are gone."""
        return self._watch.joined

    @property
    def ending(self) -> bool:
        """Whether the job has ended, or was interrupted."""
        return self._interrupted or self.finish is not None

    def removal_forced(self, worker: WorkerId) -> None:
        """Note that the worker's pod is about to be deleted, because the worker did not exit."""
        self._watch.removal_forced(worker)

    def interrupt(self, reason: str, message: str) -> None:
        """Have the coordinator stop the training, after a last checkpoint if the job keeps any."""
        self._interrupted = True
        self._inbox.put_nowait(Interrupted(reason, message))

    def stop_workers(self, reason: str, message: str) -> None:
        """Tell all connected workers to stop."""
        stop = Stop(reason=reason, message=message)
        for worker in self._channels.connected:
            self._channels.send(worker, stop)

    def end_written(self) -> None:
        """Stop all workers, including workers that connect later. Call this once the job's end is in its status.

        Until then the workers stay, so that after a crash of this operator another one gets the same reports from them.
        """
        self._end_written = True
        for held in self._held_messages:
            self._channels.send(held.worker, held.message)
        self._held_messages.clear()

    # the cluster's events

    def pod_changed(self, name: str) -> None:
        self._trigger.soon()
        self._heed(self._watch.pod_changed(name))

    def pod_deleted(self, pod: dict[str, Any]) -> None:
        if owner_uid(pod) == self._run.job.uid:
            self._trigger.soon()
            self._heed(self._watch.pod_deleted(pod))

    def node_deleted(self, pod: str, node: str) -> None:
        self._heed(self._watch.node_deleted(pod, node))

    def _heed(self, seen: Event | None) -> None:
        """Queue the watch's event, if any, for the coordinator; a loss also triggers an urgent reconciliation."""
        if seen is not None:
            self._inbox.put_nowait(seen)
        if isinstance(seen, WorkerLost):
            self._trigger.at_once()

    @property
    def event_queue_depth(self) -> int:
        """The number of events that the coordinator has not handled yet."""
        return self._inbox.qsize()

    # the coordinator

    def _tick(self) -> None:
        """Queue a tick every TICK_SECONDS, behind all earlier messages, because a tick detects silent workers."""
        now = time.monotonic()
        self._run.meter.tick_delayed(now - self._due)
        if now - self._due > LATE_SECONDS:  # the coordinator skips that time, but clouds' deadlines do not
            for name in self._watch.pods():
                self.pod_changed(name)
        self._inbox.put_nowait(Tick())
        self._due = now + TICK_SECONDS
        self._ticker = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def handle(self, event: Event) -> None:
        """Pass one event to the coordinator, and execute its commands."""
        if isinstance(event, WorkerJoined):
            if event.hello.worker not in self._watch.joined:  # also if it is lost, which triggers nothing else
                self._trigger.soon()
            self._watch.joined.add(event.hello.worker)
            event = WorkerJoined(self._watch.located(event.hello))
        match event:
            case Received(worker, WorkerWarning(reason=protocol.LOGGERS_AWAITED)):
                self.logging.add(worker)
        before = self.state
        now, commands = coordinator.step(before, event, self._clock())
        self.state = now
        self._run.meter.handled(event, before, now)
        if isinstance(event, PreemptionNotice) and event.cause is not None and event.cause in commands:
            self._run.meter.signals[event.cause.reason] += 1
        if now.plan is not before.plan and now.plan and now.plan.reason in URGENT:
            self._burst.noticed()
        done = now.progress
        figures = StepFigures(done.losses.get(done.step - 1), done.gradient_norm, done.learning_rate)
        self.record.follow(done.step, figures, now.moves.takeovers)
        self.finish = next((c for c in commands if isinstance(c, Finish)), self.finish)
        messages = [command for command in commands if isinstance(command, Emit)]
        if owed := self._feed.follow(event, messages, now.plan if now.terms.history else None):
            self._channels.send(*owed)
        for command in commands:
            self._execute(command)
        if now.plan is not None and now.plan is not before.plan and now.phase == "Recovering":
            self._compare_with_pods(now.plan)
        if any(not isinstance(command, Send) for command in commands):
            self._trigger.at_once()

    def _compare_with_pods(self, plan: Plan) -> None:
        """Report the plan's workers without pods as absent: kopf listed all pods before it reported this job."""
        if absent := plan.worker_ids() - self._watch.pods().keys() - self.state.membership.gone:
            self._inbox.put_nowait(WorkersAbsent(absent, "its pod is gone"))

    def _execute(self, command: Command) -> None:
        match command:
            case AddWorkers() | RemoveWorker() | Finish():
                pass  # the reconciliation, due at once, creates and deletes pods
            case Send(worker, message):
                if self.finish is not None and not self._end_written:
                    self._held_messages.append(command)
                else:
                    self._channels.send(worker, message)
            case Emit(reason, message, warning):
                self.events.append(command)
                level = logging.WARNING if warning else logging.INFO
                logger.log(level, "%s/%s: %s: %s", *self._run.job.key, reason, message)
