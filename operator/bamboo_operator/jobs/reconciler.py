"""Reconciles one BambooJob, from when it is first seen until it is deleted: idle, training, or over and cleaned up.

There is one for each job, in a task of its own.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from bamboo_core.control.protocol import Stop
from bamboo_core.coordinator.events import Status
from bamboo_core.job.api_object import Metadata, read_leniently
from bamboo_core.job.manifest import read_spec
from bamboo_core.job.spec import JobSpec
from bamboo_core.kube.errors import JobGone, RemoteError
from bamboo_core.view.job_view import JobView
from bamboo_operator.auth.worker_gateway import workers_path
from bamboo_operator.jobs.coordinator_runner import CoordinatorRunner, TrainingRun
from bamboo_operator.jobs.cost_counter import CostCounter
from bamboo_operator.jobs.effective_spec import EffectiveSpec
from bamboo_operator.jobs.late_workers import stopping_late_workers
from bamboo_operator.jobs.meter import JobMeter
from bamboo_operator.jobs.reconcile_schedule import RECONCILE_SECONDS, RESYNC_SECONDS, IdleListener, ReconcileTrigger
from bamboo_operator.jobs.shared import SharedResources
from bamboo_operator.jobs.training import Training
from bamboo_operator.kube.attempts import ApiAttempts
from bamboo_operator.kube.objects import JobIdentity, JobKey, utc_now
from bamboo_operator.manifests.worker_pod import JobMeta, WorkerPodSettings
from bamboo_operator.pods.controller import PodController
from bamboo_operator.pods.job_pods import JobPods
from bamboo_operator.pods.removal import PodRemoval
from bamboo_operator.pods.rolling_change import RollingChange
from bamboo_operator.pods.worker_templates import WorkerTemplates
from bamboo_operator.status.event_queue import EventQueue, post_events
from bamboo_operator.status.operated_job import OperatedJob
from bamboo_operator.status.writer import StatusWriter

RECHECK_SECONDS = 30.0  # what the API server refuses today it may accept tomorrow


class JobReconciler:
    """body: the BambooJob as the API server has it; edited() brings newer ones."""

    def __init__(self, body: Mapping[str, Any], shared: SharedResources) -> None:
        self.body, self._shared = body, shared
        metadata, status = body["metadata"], body.get("status") or {}
        self.key: JobKey = (metadata["namespace"], metadata["name"])
        self.uid: str = metadata["uid"]
        self._made = read_leniently(Metadata, metadata).creation_timestamp
        self._job = JobIdentity(self.key, self.uid)
        self.meter = JobMeter(shared.counts)
        self._meta = JobMeta(uid=self.uid)
        self._edited = asyncio.Event()
        self._trigger = ReconcileTrigger()
        self._events = EventQueue()  # while there is no coordinator
        self.runner: CoordinatorRunner | None = None  # the last one
        self._training: Training | None = None
        self._attempts = ApiAttempts(self.key)
        self._removal = PodRemoval(self._job, shared.cluster, shared.api, self._attempts)
        self._status = StatusWriter(self._job, status, shared.api)
        self._pods = JobPods(self._job, shared.cluster)
        self._cost = CostCounter(self._pods, self._status, self.meter)
        self._spec = EffectiveSpec(self._job, body, self._status, shared.api, self._attempts)

    def known(self) -> OperatedJob:
        """What the job's page and metrics are made of."""
        runner, status, (namespace, name) = self.runner, self._status, self.key
        view = JobView(
            metadata=Metadata(name=name, namespace=namespace, uid=self.uid, creation_timestamp=self._made),
            spec=self._known_spec(),
            status=status.written,
            live=runner.status() if runner else None,
        )
        return OperatedJob(view=view, facts=status.facts, record=runner.record if runner else None)

    def _known_spec(self) -> JobSpec:
        return self._status.facts.spec or read_spec(self.body)

    @property
    def last_progress(self) -> float:
        """When the job got on, or waited for something that it may wait for (time.monotonic())."""
        return self._attempts.last_progress

    @property
    def event_queue_depth(self) -> int:
        """Events that wait for the job's coordinator."""
        return self.runner.event_queue_depth if self.runner else 0

    def edited(self, body: Mapping[str, Any]) -> None:
        """The coordinator is told of an edit at once, also while the API server does not answer."""
        changed = body["metadata"].get("generation") != self.body["metadata"].get("generation")
        self.body = body
        self._spec.update(body)
        if changed:
            self._edited.set()
            self._trigger.at_once()
            if self._training:
                self._training.apply_edits()

    def _count_cost(self) -> None:
        """Count what the job costs, with those workers of the last training that have connected."""
        self._cost.count(joined=self.runner.joined if self.runner else ())

    def deleted(self) -> None:
        """The job was deleted: its workers need not wait for the end of their pods' grace period."""
        if self.runner:
            self.runner.stop_workers("JobDeleted", "the job was deleted")

    async def write_deletion(self) -> None:
        """Write that nothing runs any more, for as long as the job is there: a finalizer may keep it.

        Call this after run() has ended, or instead of it.
        """
        if self._status.facts.spec is None:
            self._spec.read()
        self._status.update(deleted=True)
        with contextlib.suppress(JobGone):
            await self._write_until_done(None)

    async def run(self) -> None:
        """Until the job is deleted because its time is over, or this task is cancelled."""
        while not self._status.over:
            self._edited.clear()
            spec = await self._spec.next(self._pod_settings())
            self._count_cost()
            if self._edited.is_set():
                continue
            held = self._status.facts.suspended
            if spec is None or (held and not self._trains()):
                await self._stay_idle(spec)
                continue
            if held:  # since nobody looked: its state is kept, and then it stops
                self._edited.set()
            await self._train(spec)
            if not self._status.over:  # it was suspended; by now it may be resumed
                await self._removal.remove_all()
        await self._clean_up()

    def _trains(self) -> bool:
        """Are there workers of a training that has not ended, left by another operator?"""
        return self._spec.begun and self._removal.any_running()

    def _pod_settings(self) -> WorkerPodSettings:
        url = self._shared.url.rstrip("/") + workers_path(self.key)
        return replace(self._shared.settings, coordinator_url=url)

    async def _stay_idle(self, spec: JobSpec | None) -> None:
        """Until the job is edited, because it is suspended or not valid (None).

        Then no worker runs, except those of a job that has begun: they do not stop for a bad edit.
        """
        shared = self._shared
        self._spec.report_problems(self._events.append)
        if spec is None and self._spec.begun:
            self._status.update(unattended=True)
            await self._write_until_done(None)
            await self._wait_for_edit(RECHECK_SECONDS, workers_stay=True)
            return
        stop = Stop(reason="Suspended", message="the job is suspended")
        async with stopping_late_workers(self._job, shared.cluster, shared.gateway, shared.reviews, stop):
            await self._removal.remove_all()
            await self._write_until_done(None)
            await self._wait_for_edit(None if spec else RECHECK_SECONDS)

    async def _train(self, spec: JobSpec) -> None:
        """Until the job is over, or is suspended."""
        shared, status = self._shared, self._status
        plan = status.plan  # not the epoch, which a suspended job keeps
        status.begin()
        run = TrainingRun(
            job=self._job,
            spec=spec,
            manifest=self._spec.begin(resumed=plan is not None),
            resumed=plan is not None,
            known_lost=status.lost | self._removal.deleted,
            counted=status.counted,
            meter=self.meter,
            marks=shared.marks,
            burst=shared.burst,
            earlier=status.progress(),
        )
        runner = CoordinatorRunner(run, shared.cluster, shared.gateway, shared.reviews, shared.key, self._trigger)
        self.meter.begin()
        self._spec.report_problems(runner.events.append)
        self.runner = runner
        settings, record = self._pod_settings(), runner.events.append
        templates = WorkerTemplates(self._meta, settings)
        controller = PodController(
            self._job,
            runner,
            shared.cluster,
            shared.api,
            settings=settings,
            record=record,
            created=status.created,
            resumed=run.resumed,
            rolling=RollingChange(templates, record),
            made=self._made.timestamp() if self._made else 0.0,
            holders=shared.quota_holders,
        )
        training = Training(
            run,
            runner,
            controller,
            status,
            self._spec,
            self._cost,
            shared,
            self._attempts,
            edited=self._edited,
            trigger=self._trigger,
        )
        try:
            self._training = training
            await training.run()
            self._training = None
            await self._removal.wait_for_exit(self._count_cost, lambda: runner.logging)
            status.update(pods=dict(controller.pods.by_pool()), startup_problems=(), rollout=controller.rollout)
            await self._write_until_done(runner.status())
            await self._post(runner.events)  # what workers have said since the end was written
        finally:
            self._training = None
            await training.close()

    async def _write_until_done(self, status: Status | None) -> None:
        """The status; and then events, which are tried again with the next status."""
        while True:
            try:
                await self._status.write(status)
            except RemoteError as error:
                self._attempts.log_failure("write the status", error)
                self._attempts.heartbeat()
                await asyncio.sleep(RECONCILE_SECONDS)
            else:
                self._attempts.succeeded("write the status")
                break
        await self._post(self._events)

    async def _post(self, events: EventQueue) -> None:
        try:
            await post_events(self._shared.api, self._job, events)
        except RemoteError as error:
            self._attempts.log_failure("post events", error)

    async def _wait_for_edit(self, seconds: float | None, *, workers_stay: bool = False) -> None:
        """Wait at most that long. Pods that are seen only now are deleted, unless the workers stay."""
        end = time.monotonic() + (math.inf if seconds is None else seconds)
        with self._woken_by_pods():
            while not self._edited.is_set() and time.monotonic() < end:
                self._attempts.heartbeat()
                self._trigger.clear()
                if not workers_stay and self._removal.living():
                    await self._removal.remove_running()
                self._count_cost()
                await self._write_until_done(None)
                await self._trigger.wait(max(0.0, min(RESYNC_SECONDS, end - time.monotonic())))

    @contextlib.contextmanager
    def _woken_by_pods(self) -> Iterator[None]:
        cluster, listener = self._shared.cluster, IdleListener(self._trigger.at_once)
        cluster.add_listener(self.key, listener)
        try:
            yield
        finally:
            cluster.remove_listener(self.key, listener)

    # the end

    async def _clean_up(self) -> None:
        shared = self._shared
        stop = Stop(reason="JobOver", message="the job is over")
        async with stopping_late_workers(self._job, shared.cluster, shared.gateway, shared.reviews, stop):
            await self._removal.remove_running()
            while (left := self._remaining_ttl()) is None or left > 0:
                await self._wait_for_edit(left)
                self._edited.clear()
        await self._attempts.until_done("delete the job", lambda: shared.api.delete_job(*self.key, self.uid))

    def _remaining_ttl(self) -> float | None:
        """Seconds until the job, which is over, is to be deleted; None if it stays."""
        spec = self._spec.parsed()
        if spec is None or spec.ttl_seconds_after_finished is None:
            return None
        ended = self._status.written.ended
        done = ended.last_transition_time if ended and ended.last_transition_time else utc_now()
        return (done + timedelta(seconds=spec.ttl_seconds_after_finished) - utc_now()).total_seconds()
