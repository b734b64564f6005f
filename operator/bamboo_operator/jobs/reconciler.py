"""The reconciler of one BambooJob, from its first event to its deletion: idle, training, or over and cleaned up.

Each job has one, in its own task. It decides nothing about workers: that is up to the coordinator, which never waits
for the API server. Pods, events and status follow the coordinator.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from bamboo_core.control.protocol import Stop
from bamboo_core.coordinator.events import SpecChanged, Status
from bamboo_core.job.api_object import Metadata, read_api_part, written
from bamboo_core.job.manifest import read_spec
from bamboo_core.job.spec import JobSpec, gives_back
from bamboo_core.kube.errors import JobGone, RemoteError
from bamboo_core.view.job_view import JobView
from bamboo_operator.auth.worker_gateway import workers_path
from bamboo_operator.jobs.coordinator_runner import CoordinatorRunner, TrainingRun
from bamboo_operator.jobs.cost_counter import CostCounter
from bamboo_operator.jobs.effective_spec import EffectiveSpec
from bamboo_operator.jobs.late_workers import stopping_late_workers
from bamboo_operator.jobs.meter import JobMeter
from bamboo_operator.jobs.reconcile_schedule import (
    QUIET_SECONDS,
    RECONCILE_SECONDS,
    RESYNC_SECONDS,
    IdleListener,
    ReconcileSchedule,
    ReconcileTrigger,
)
from bamboo_operator.jobs.shared import SharedResources
from bamboo_operator.kube.attempts import ApiAttempts
from bamboo_operator.kube.objects import JobIdentity, JobKey, utc_now
from bamboo_operator.manifests.worker_pod import WorkerPodSettings
from bamboo_operator.pods.controller import PodController
from bamboo_operator.pods.removal import PodRemoval
from bamboo_operator.pods.view import JobPods
from bamboo_operator.status.budget import money_spent
from bamboo_operator.status.event_queue import EventQueue, post_events
from bamboo_operator.status.facts import OperatedJob, StatusFacts
from bamboo_operator.status.writer import StatusWriter

TURN_SECONDS = 30.0  # between heartbeats of a job that waits for its turn
LONGEST_SECONDS = 120.0  # after which a reconciliation counts as stuck
RECHECK_SECONDS = 30.0  # after which a refused object is tried again


class JobReconciler:
    """The reconciliation loop of one BambooJob. body: the BambooJob from the API server; edited() brings newer ones."""

    def __init__(self, body: Mapping[str, Any], shared: SharedResources) -> None:
        self.body, self._shared = body, shared
        metadata, status = body["metadata"], body.get("status") or {}
        self.key: JobKey = (metadata["namespace"], metadata["name"])
        self.uid: str = metadata["uid"]
        self._made = read_api_part(Metadata, metadata).creation_timestamp
        self._job = JobIdentity(self.key, self.uid)
        self.meter = JobMeter(shared.counts)
        self._edited = asyncio.Event()
        self._trigger = ReconcileTrigger()
        self._idle_events = EventQueue()  # while there is no coordinator
        self.runner: CoordinatorRunner | None = None  # the newest, with its pods' controller
        self._controller: PodController | None = None
        self._follows_edits = False  # whether a coordinator takes edits over
        self._deleted = self._unattended = False
        self.attempts = ApiAttempts(self.key)
        self._pods = JobPods(self._job, shared.cluster, shared.api)
        self._removal = PodRemoval(self._pods, self.attempts)
        self._status = StatusWriter(self._job, status, shared.api)
        self._cost = CostCounter(self._pods, self.meter, self._status.written.cost.counted_until)
        self._spec = EffectiveSpec(self._job, body, self._status.written, shared.api, self.attempts)
        self._save_after = 0.0  # time.monotonic()
        self._began = math.inf  # time.monotonic() at which the present reconciliation got its turn

    def known(self) -> OperatedJob:
        """Return the data for the job's page and metrics."""
        runner, status, (namespace, name) = self.runner, self._status, self.key
        view = JobView(
            metadata=Metadata(name=name, namespace=namespace, uid=self.uid, creation_timestamp=self._made),
            spec=self._spec.spec or read_spec(self.body),
            status=status.written,
            live=runner.status() if runner else None,
        )
        return OperatedJob(view=view, facts=self._facts(), record=runner.record if runner else None)

    def _facts(self, plan: str | None = None) -> StatusFacts:
        """Collect the facts about the job beyond its coordinator's status. plan: the plan record to write."""
        spec, cost, runner, controller = self._spec, self._cost, self.runner, self._controller
        return StatusFacts(
            now=utc_now(),
            generation=spec.generation,
            spec=spec.spec,
            problems=spec.problems,
            refused=spec.refused,
            warnings=spec.warnings,
            surprises=spec.surprises,
            deleted=self._deleted,
            unattended=self._unattended,
            earlier=self._status.earlier,
            pods=self._pods.by_pool(),
            paid=cost.paid,
            cost=self._status.earlier_cost + cost.cost,
            counted_until=cost.counted_until,
            finish=runner.finish if runner else None,
            startup_problems=controller.problems if controller else (),
            rollout=controller.rolling.record if controller else None,
            unmanaged=controller.unmanaged if controller else "",
            plan=plan,
        )

    def edited(self, body: Mapping[str, Any]) -> None:
        """Replace the BambooJob with a newer version of it. Pass edits of its spec on to the coordinator at once,
        even if the API server does not answer.
        """
        changed = body["metadata"].get("generation") != self.body["metadata"].get("generation")
        self.body = body
        self._spec.update(body)
        if changed:
            self._edited.set()
            self._trigger.at_once()
            self._apply_edits()

    def again(self) -> "JobReconciler":
        """Return a new reconciler of the job that continues from the last written status."""
        return JobReconciler({**self.body, "status": written(self._status.written)}, self._shared)

    def deleted(self) -> None:
        """Tell the workers of a deleted job to stop now, instead of training on until their grace period ends."""
        if self.runner:
            self.runner.stop_workers("JobDeleted", "the job was deleted")

    async def write_deletion(self) -> None:
        """Write a status that shows nothing running, for a job whose deletion a finalizer may delay.

        Call this after run() has ended, or instead of it.
        """
        if self._spec.spec is None:
            self._spec.read()
        self._deleted = True
        with contextlib.suppress(JobGone):
            await self._write_until_done()

    async def run(self) -> None:
        """Reconcile the job until it is over, then delete it after its TTL; without a TTL, wait until an edit
        sets one. Raises JobGone or the coordinator's error; may be cancelled.
        """
        while self._status.written.ended is None:
            self._edited.clear()
            spec = await self._spec.next(self._status.plan, self._pod_settings())
            self._count()
            if self._edited.is_set():
                continue
            held = self._facts().suspended
            if spec is None or (held and not (self._status.plan is not None and self._removal.any_running())):
                await self._stay_idle(spec)
                continue
            if held:  # suspended while no operator ran: save its state, then stop it
                self._edited.set()
            elif self._status.suspended:
                await self._end_suspension()
            await self._train(spec)
        await self._clean_up()

    async def _end_suspension(self) -> None:
        """Delete the pods of a resumed job, whose workers were told to stop, then write that it is not suspended.

        In this order another operator can tell these workers from the workers of the next training.
        """
        self._controller = None  # of the earlier training
        await self._removal.remove_all()
        await self._write_until_done()

    def _pod_settings(self) -> WorkerPodSettings:
        url = self._shared.url.rstrip("/") + workers_path(self.key)
        return replace(self._shared.settings, coordinator_url=url)

    def _count(self) -> None:
        """Count the job's cost, also of connected workers without a known node, and tell the coordinator the prices."""
        if self._spec.spec is not None:
            self._cost.count(self._spec.spec.node_pools, joined=self.runner.joined if self.runner else ())
        if self._follows_edits:
            self._tell_prices()

    # idle

    async def _stay_idle(self, spec: JobSpec | None) -> None:
        """Wait for an edit of a suspended or invalid job. spec: None if invalid; then wait at most RECHECK_SECONDS.

        Meanwhile remove the job's workers, but let them train on if an edit has made a training job invalid.
        """
        self._spec.report_problems(self._idle_events.append)
        if spec is None and self._status.plan is not None:
            self._unattended = True
            await self._write_until_done()
            await self._wait_for_edit(RECHECK_SECONDS, workers_stay=True)
            return
        stop = Stop(reason="Suspended", message="the job is suspended")
        async with stopping_late_workers(self._job, self._shared, stop):
            await self._removal.remove_all()
            await self._write_until_done()
            await self._wait_for_edit(None if spec else RECHECK_SECONDS)

    async def _write_until_done(self, status: Status | None = None) -> None:
        """Write the status, with retries until that succeeds, then try once to post the events. Events that cannot be
        posted wait for the next call.
        """

        async def write() -> None:
            await self._status.write(self._facts(), status)

        await self.attempts.until_done("write the status", write, ends=())
        for queue in (self._idle_events, *([self.runner.events] if self.runner else [])):
            try:
                await post_events(self._shared.api, self._job, queue)
            except RemoteError as error:
                self.attempts.log_failure("post events", error)

    async def _wait_for_edit(self, seconds: float | None, *, workers_stay: bool = False) -> None:
        """Wait at most `seconds` (None: forever) for an edit. Delete pods that appear late, unless the workers stay."""
        end = time.monotonic() + (math.inf if seconds is None else seconds)
        with self._woken_by_pods():
            while not self._edited.is_set() and time.monotonic() < end:
                self.attempts.heartbeat()
                self._trigger.clear()
                if not workers_stay and self._pods.living():
                    await self._removal.remove_running()
                self._count()
                await self._write_until_done()
                pause = RESYNC_SECONDS if self._pods.living() else QUIET_SECONDS
                await self._trigger.wait(max(0.0, min(pause, end - time.monotonic())))

    @contextlib.contextmanager
    def _woken_by_pods(self) -> Iterator[None]:
        cluster, listener = self._shared.cluster, IdleListener(self._trigger.at_once)
        cluster.add_listener(self.key, listener)
        try:
            yield
        finally:
            cluster.remove_listener(self.key, listener)

    # training

    async def _train(self, spec: JobSpec) -> None:
        """Reconcile until the job is over or suspended, and its workers have exited or have had time to exit."""
        runner, controller = self._begin(spec)
        self.runner, self._controller, self._follows_edits = runner, controller, True
        self._tell_prices()  # before the coordinator asks for workers
        coordinating = asyncio.create_task(runner.run(), name=f"coordinator of {self.key}")
        coordinating.add_done_callback(lambda _: self._trigger.at_once())
        try:
            await self._reconcile_until_over(runner, controller, coordinating)
            self._follows_edits = False
            await self._attempt("remove the disruption budget", controller.end())
            await self._removal.wait_for_exit(self._count, lambda: runner.logging)
            await self._write_until_done(runner.status())  # and post events since the end was written
        finally:  # also after a failure, so that workers notice and connect to the next coordinator
            self._follows_edits = False
            controller.close()
            coordinating.cancel()
            await asyncio.gather(coordinating, return_exceptions=True)
            await runner.close()

    def _begin(self, spec: JobSpec) -> tuple[CoordinatorRunner, PodController]:
        shared, status = self._shared, self._status
        resumed = status.plan is not None  # not by the epoch, which a suspended job keeps
        before = status.written.plan_record
        status.begin()
        self._unattended = False
        run = TrainingRun(
            job=self._job,
            spec=spec,
            manifest=self._spec.begin(resumed=resumed),
            resumed=resumed,
            known_lost=(before.lost or frozenset()) | self._pods.deleted(),
            counted=before.counted or frozenset(),
            meter=self.meter,
            earlier=status.progress(self._spec.spec),
        )
        runner = CoordinatorRunner(run, shared, self._trigger)
        self.meter.begin()
        settings, record = self._pod_settings(), runner.events.append
        self._spec.report_problems(record)
        controller = PodController(
            self._pods,
            shared.api,
            demand=runner.demand,
            tell=runner.handle,
            forced=runner.removal_forced,
            settings=settings,
            record=record,
            created=status.written.workers_created or 0,
            resumed=resumed,
            made=self._made.timestamp() if self._made else 0.0,
            holders=shared.quota_holders,
        )
        return runner, controller

    def _apply_edits(self) -> None:
        """Pass edits and a spent budget on to the coordinator.

        Changes after the end of this training are left to the next training, or to the clean-up.
        """
        runner = self.runner
        if not self._follows_edits or runner is None or runner.ending:
            return
        if self._edited.is_set():
            self._edited.clear()
            spec = self._spec.follow()
            self._spec.report_problems(runner.events.append)
            if spec.suspend:
                message = "the job is suspended; it goes on from its newest checkpoint, or from step 0 if it has none"
                runner.interrupt("Suspended", message)
                return
            runner.tell(SpecChanged(spec))
        if why := money_spent(self._facts()):
            runner.interrupt("BudgetSpent", why)

    def _tell_prices(self) -> None:
        """Send the coordinator the current prices of workers, if the job's elastic objective depends on them."""
        if self.runner is not None and gives_back(self.runner.state.spec):
            self.runner.tell(self._cost.prices(self._spec.spec))

    async def _reconcile_until_over(
        self, runner: CoordinatorRunner, controller: PodController, coordinating: "asyncio.Task[None]"
    ) -> None:
        schedule = ReconcileSchedule()
        while not schedule.over:
            self._trigger.clear()
            self._apply_edits()
            began, finished = time.monotonic(), runner.finish is not None
            pods, events = await self._reconcile_with_status(runner, controller)
            status = await self._write_status(runner, controller)
            ended, ok, end_written = time.monotonic(), pods and events and status, finished and status
            self.meter.reconciled(ended - began, ok=ok)
            schedule = schedule.after(began, ended, ok=ok, end_written=end_written, unposted=bool(runner.events))
            if end_written:
                runner.end_written()
            if schedule.over:
                return
            self.attempts.heartbeat()
            if coordinating.done() and runner.finish is None:
                await coordinating  # raises the error that ended it
            while (left := schedule.due(self._trigger.urgent, self._trigger.changed) - time.monotonic()) > 0:
                await self._trigger.wait(left)
                self._count()

    async def _reconcile_with_status(self, runner: CoordinatorRunner, controller: PodController) -> tuple[bool, bool]:
        """Reconcile the pods and post events; return whether each succeeded.

        Meanwhile, write the status, until LONGEST_SECONDS after the job's turn to reconcile began. With many busy jobs
        and a slow API server, the wait for that turn and the turn itself may take minutes.
        """
        self._began = math.inf
        working = asyncio.create_task(self._reconcile(runner, controller), name=f"reconcile {self.key}")
        try:
            while time.monotonic() < self._began + LONGEST_SECONDS:
                await asyncio.wait({working}, timeout=RECONCILE_SECONDS)
                if working.done():
                    break
                await self._write_status(runner, controller)
            return await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _reconcile(self, runner: CoordinatorRunner, controller: PodController) -> tuple[bool, bool]:
        async with turn(self._shared.turns, self.attempts.heartbeat):
            await self._shared.burst.wait_for_its_end()
            self._began = time.monotonic()
            await self._save_manifest()
            pods = await self._attempt("bring the pods up to date", controller.reconcile())
            controller.note_problems()  # this also records events
            posting = post_events(self._shared.api, self._job, runner.events)
            return pods, await self._attempt("post events", posting)

    async def _save_manifest(self) -> None:
        """Save the accepted manifest for the next operator. After a failure, try again after RECHECK_SECONDS."""
        accepted = self._spec.accepted
        if accepted.saved or time.monotonic() < self._save_after:
            return
        if not await self._attempt("save the manifest that the job's workers run with", accepted.save()):
            self._save_after = time.monotonic() + RECHECK_SECONDS

    async def _write_status(self, runner: CoordinatorRunner, controller: PodController) -> bool:
        """Write the status if it has changed enough; return whether that succeeded."""
        async with turn(self._shared.status_turns, self.attempts.heartbeat):
            await self._shared.burst.wait_for_its_end()
            self._count()
            controller.note_problems()
            facts = self._facts(runner.plan_record(self._pods.deleted()))
            write = self._status.write(facts, runner.status(), controller.created)
            if not await self._attempt("write the status", write):
                return False
            for warning in self._status.take_warnings():
                runner.events.append(warning)
                self._trigger.soon()  # so that it is posted
            return True

    async def _attempt(self, what: str, act: Coroutine[Any, Any, None]) -> bool:
        """Await one part of a reconciliation; return whether it succeeded. An API error is logged and does not stop
        the other parts.
        """
        assert self.runner is not None
        return await self.attempts.once(what, act, self.runner.events.append)

    # the end

    async def _clean_up(self) -> None:
        stop = Stop(reason="JobOver", message="the job is over")
        async with stopping_late_workers(self._job, self._shared, stop):
            await self._removal.remove_running()
            while (left := self._remaining_ttl()) is None or left > 0:
                await self._wait_for_edit(left)
                self._edited.clear()
        await self.attempts.until_done("delete the job", lambda: self._shared.api.delete_job(*self.key, self.uid))

    def _remaining_ttl(self) -> float | None:
        """Return the seconds until an ended job is to be deleted; None if it stays, or its newest spec is invalid."""
        spec = self._spec.parsed()
        if spec is None or spec.ttl_seconds_after_finished is None:
            return None
        ended = self._status.written.ended
        done = ended.last_transition_time if ended and ended.last_transition_time else utc_now()
        return (done + timedelta(seconds=spec.ttl_seconds_after_finished) - utc_now()).total_seconds()


@contextlib.asynccontextmanager
async def turn(turns: asyncio.Semaphore, heartbeat: Callable[[], None]) -> AsyncIterator[None]:
    """Limit concurrent reconciliations or status writes: acquire the semaphore for the block, first come, first served.

    Since few run at once, their API calls do not keep other jobs' coordinators from deciding. heartbeat: called while
    the job waits, so that it does not count as stuck.
    """
    beating = asyncio.create_task(_beat(heartbeat))
    try:
        await turns.acquire()
    finally:
        beating.cancel()
    try:
        yield
    finally:
        turns.release()


async def _beat(heartbeat: Callable[[], None]) -> None:
    """Call the heartbeat every TURN_SECONDS until cancelled."""
    while True:
        heartbeat()
        await asyncio.sleep(TURN_SECONDS)
