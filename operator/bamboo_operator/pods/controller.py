"""Brings the pods of one job to what its coordinator wants. Level-triggered: what fails is tried again next time."""

import asyncio
import math
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from bamboo_core.coordinator.events import Emit, PreemptionNotice, RequestsWithdrawn, WorkerState
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.job.spec import JobSpec
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import ApiError, RemoteError
from bamboo_core.names import worker_name
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.cluster.cache import ClusterCache
from bamboo_operator.kube.objects import JobIdentity, owner_uid, utc_now
from bamboo_operator.kube.refusals import PodRefused
from bamboo_operator.manifests.network_policy import network_policy
from bamboo_operator.manifests.spread import zone_group
from bamboo_operator.manifests.worker_pod import JobMeta, WorkerPodSettings, worker_number, worker_pool
from bamboo_operator.pods.deletions import PodDeletions
from bamboo_operator.pods.disruption_budget import REPAIR_SECONDS, DisruptionBudgetWriter
from bamboo_operator.pods.job_pods import JobPods, age
from bamboo_operator.pods.pools import choose_pool, fallback_pool
from bamboo_operator.pods.queueing import (
    WAITING,
    HeldQuota,
    QueueRequest,
    QuotaHolders,
    admitted,
    next_request,
    unmanaged,
    waiting_for_quota,
    with_priority_class,
)
from bamboo_operator.pods.requests import PodRequests
from bamboo_operator.pods.rolling_change import RollingChange, Sight
from bamboo_operator.pods.rollout import RolloutRecord
from bamboo_operator.pods.scale_down import WorkersByPool, scale_down
from bamboo_operator.pods.starting import join_timeout
from bamboo_operator.pods.starting.scheduling_gates import GateReleases, waits_for_quota
from bamboo_operator.pods.starting.start_backoff import StartBackoff, failed_start
from bamboo_operator.pods.starting.startup_events import StartupEvents
from bamboo_operator.pods.starting.startup_problems import (
    GATED,
    StartupProblem,
    missing_pods,
    startup_problems,
)
from bamboo_operator.pods.worker_templates import WorkerTemplate
from bamboo_operator.signals.signals import is_deleted, worker_exit

LEAVE_SECONDS = 10.0  # for a worker that was told to stop, before its pod is deleted
KEPT_CRASHES = 10  # pods of workers that ended by themselves, for their logs
PODS_AT_ONCE = 50
CREATING_SECONDS = 10.0  # after which the rest of a reconciliation gets its turn
GIVE_BACK_SECONDS = 3600.0


class PodController:
    """The pods of one job. requests: the job's coordinator. created: how many workers the job has had. record: takes
    events for the user. made: when the job was created. resumed: did the job run before this operator took it over?
    """

    def __init__(
        self,
        job: JobIdentity,
        requests: PodRequests,
        cluster: ClusterCache,
        api: KubeApi,
        *,
        settings: WorkerPodSettings,
        record: Callable[[Emit], None],
        created: int,
        resumed: bool,
        rolling: RollingChange,
        made: float,
        holders: QuotaHolders,
    ) -> None:
        self._job, self._requests, self._cluster, self._api = job, requests, cluster, api
        self._made, self._holders = made, holders
        self._quota = HeldQuota(uid=job.uid)
        self._meta = JobMeta(uid=job.uid)
        self._settings, self._record = settings, record
        self.pods = JobPods(job, cluster)
        self.created = max(created, self.pods.next_number())
        self._rolling = rolling
        self._waiting_since: float | None = None
        self._releases = GateReleases(self._spec)
        self._given_back: set[WorkerId] = set()
        self._probes: frozenset[WorkerId] = frozenset()
        self._began = self._recovered = utc_now()
        self._recovering = False
        self._backoff = StartBackoff()
        self._failed_starts = {name for name, pod in self.pods.all().items() if failed_start(pod)}
        self._stopping: dict[WorkerId, float] = {}  # workers that were told to stop and have not ended: since when
        self._startup_events = StartupEvents(job.key[0], api)
        self._joined_before: set[WorkerId] = set()
        self._repair_at = -math.inf if settings.network_policy else math.inf  # the network policy; time.monotonic()
        self._budget: DisruptionBudgetWriter | None = None
        if settings.disruption_budgets:
            fresh = created == 0 and not resumed
            self._budget = DisruptionBudgetWriter(api, self._meta, record, fresh=fresh)
        self._deletions = PodDeletions(self.pods, cluster, api)
        self._pools_full = False  # pods are wanted, and no pool may have more
        self._refusal: PodRefused | None = None  # of the newest pod that was to be created
        self._reported: set[str] = set()  # reasons of startup problems
        self.problems: tuple[StartupProblem, ...] = ()  # why workers do not start, when that was noted last

    async def reconcile(self) -> None:
        """Raises the last RemoteError; what was not done is done the next time."""
        await asyncio.sleep(0)  # so that the coordinator first handles what it has been told, such as an edit
        self._observe()
        failed: Exception | None = None
        for part in (
            self._apply_network_policy,
            self._update_disruption_budget,
            self._let_quota_go,
            self._create_pods,
            self._delete_ended_pods,
            self._replace_unjoined,
            self._read_startup_events,
            self._move_to_fallback,
            self._roll,
            self._scale_down,
        ):
            if self._requests.finished:
                break  # the pods that are left then are for the clean-up
            try:
                await part()
            except RemoteError as error:
                failed = error
        if failed is not None:
            raise failed

    async def end(self) -> None:
        """The job trains no more; its pods are for others to delete. Raises RemoteError."""
        self.problems = ()
        if self._budget is not None:
            await self._budget.remove(self._spec)

    def close(self) -> None:
        """Let no other job wait for this one to let its quota go."""
        self._holders.forget(self._job.key)

    def note_problems(self) -> None:
        """Note why workers do not start; a reason that is new is recorded as an event."""
        backoff = self._backoff if self._backoff.holds(time.monotonic()) else None
        missing = missing_pods(self.adding, backoff, refused=str(self._refusal or ""), pools_full=self._pools_full)
        unjoined, unrequested = self._not_joined(), 0 if self._may_ask_for_quota() else self.adding
        found = (*missing, *startup_problems(unjoined, self._startup_events.problems))
        found = (*found, *self._quota.problem(time.monotonic()), *waiting_for_quota(unjoined, unrequested))
        if late := join_timeout.join_problem(self._unjoined(self._began), self._settings.coordinator_url):
            found = (*found, late)
        for problem in found:
            if problem.reason not in self._reported:
                waits = problem.reason in (GATED, WAITING)
                self._record(Emit(problem.reason, problem.message, not waits))
        self._reported = {problem.reason for problem in found}
        self.problems = found

    @property
    def rollout(self) -> RolloutRecord | None:
        """How far it is; None if that is not known yet."""
        return self._rolling.record

    @property
    def deleting(self) -> frozenset[WorkerId]:
        """Workers whose pods this operator has deleted, and which are still there."""
        return self._deletions.ordered()

    @property
    def adding(self) -> int:
        """Pods that are wanted and not there."""
        return max(0, self._requests.wanted.requested - len(self._not_joined().keys() - self._probes))

    # what is there

    @property
    def _spec(self) -> JobSpec:
        """The one in force: what is fixed while the job runs is so for new workers, too."""
        return self._requests.wanted.spec

    def _known(self) -> set[WorkerId]:
        """Workers that have joined, or are gone."""
        return {*self._requests.joined, *self._requests.wanted.gone}

    def _not_joined(self) -> dict[str, dict[str, Any]]:
        """The pods of workers that have not joined, and may."""
        known = self._known()
        return {name: pod for name, pod in self.pods.all().items() if name not in known}

    def _without_node(self) -> dict[str, dict[str, Any]]:
        return self.pods.without_node(self._known())

    def _unscheduled(self) -> dict[str, dict[str, Any]]:
        return self.pods.unscheduled(self._known())

    def _staying(self) -> dict[str, dict[str, Any]]:
        """The pods that count as the job's: not those of workers that are lost or about to leave."""
        leaving = (worker for worker, state in self._requests.status().workers if state is WorkerState.LEAVING)
        out = {*self._requests.wanted.gone, *leaving}
        return {name: pod for name, pod in self.pods.living().items() if name not in out}

    def _queue_request(self) -> QueueRequest | None:
        """What the job asks its queue for next; None if it is in no queue."""
        if self._spec.queue is None:
            return None
        grid = self._requests.status().grid
        pipeline = len(grid[0]) if grid and grid[0] else self._spec.topology.stages
        return next_request(self._spec.queue, self._staying(), self._requests.fewest_to_begin(), pipeline)

    def _may_ask_for_quota(self) -> bool:
        """Tell whether one more pod may wait in the job's queue, if it is in one."""
        request = self._queue_request()
        return request is None or (request.room > 0 and time.monotonic() >= self._quota.until)

    @property
    def unmanaged(self) -> str:
        """Why the job's queue has no effect, a sentence; "" if it has."""
        return unmanaged(self._spec, self.pods.living().values())

    def _unjoined(self, since: datetime) -> dict[WorkerId, float]:
        return join_timeout.seconds_unjoined(self.pods.living(), self._requests.joined, since, utc_now())

    def _observe(self) -> None:
        pods, now = self.pods.all(), time.monotonic()
        self.created = max(self.created, self.pods.next_number())  # the answer to a creation may have been lost
        self._withdraw()
        self._releases.observe(self._without_node(), now)
        self._look_at_quota(now)
        if not self._unscheduled() and not (self.adding and self._may_ask_for_quota()):
            self._waiting_since = None
        elif self._waiting_since is None:
            released = {name: self._releases.at(name) for name in self._unscheduled()}
            since = (now - age(pods[name]) if at is None else at for name, at in released.items())
            self._waiting_since = min(since, default=now)
        if set(self._requests.joined) - self._joined_before:
            self._joined_before, self._backoff = set(self._requests.joined), StartBackoff()
        failed = {name: how for name in pods.keys() - self._joined_before if (how := failed_start(pods[name]))}
        if (misfit := self._requests.wanted.misfit) is not None:  # it ends, and the next one may be no better
            failed |= dict([misfit])
        for name in failed.keys() - self._failed_starts:
            number = worker_number(pods.get(name) or {}) or 0
            self._backoff = self._backoff.after(number, self.created, now, f"{name} {failed[name]}")
            self._failed_starts.add(name)
        self._rolling.look(self._sight())

    def _look_at_quota(self, now: float) -> None:
        """Note whether the job holds quota in vain: with what it holds it cannot begin, and other pods of it wait."""
        phase, staying = self._requests.status().phase, self._staying()
        waits = phase in ("Pending", "Restoring") and any(map(waits_for_quota, staying.values()))
        in_vain = waits and 0 < admitted(staying) < self._requests.fewest_to_begin()
        self._quota = self._quota.look(in_vain=in_vain, trains=phase in ("Running", "Saving"), now=now)
        if in_vain:
            self._holders.note(self._job.key, (self._made, self._job.uid))
        else:
            self.close()

    def _sight(self) -> Sight:
        return Sight(
            wanted=self._requests.wanted,
            status=self._requests.status(),
            pods=self.pods.all(),
            startup_events=self._startup_events.problems,
        )

    def _withdraw(self) -> None:
        if count := min(self.adding, self._requests.wanted.surplus):
            self._requests.handle(RequestsWithdrawn(count))

    # creating

    async def _apply_network_policy(self) -> None:
        """Again and again: nobody tells that it was deleted or changed, and without it the workers' ports are open."""
        if (now := time.monotonic()) >= self._repair_at:
            await self._api.apply_network_policy(network_policy(self._spec, self._meta))
            self._repair_at = now + REPAIR_SECONDS

    async def _update_disruption_budget(self) -> None:
        if self._budget is not None:
            status = self._requests.status()
            pods, joined = self.pods.living(), {worker for worker, _ in status.workers}
            numbers = [n for name, pod in pods.items() if name in joined and (n := worker_number(pod)) is not None]
            await self._budget.update(status, self._spec, sorted(numbers))

    async def _create_pods(self) -> None:
        self._pools_full = False
        end = time.monotonic() + CREATING_SECONDS
        for _ in range(PODS_AT_ONCE):
            self._withdraw()  # fewer may be wanted since the last one was created
            now = time.monotonic()
            if not self.adding or self._requests.finished or self._backoff.holds(now) or now > end:
                return
            if not self._may_ask_for_quota():
                return
            pools = self._spec.node_pools
            pool = choose_pool(pools, time.monotonic(), self._waiting_since, self.pods.by_pool())
            if pools and pool is None:
                self._pools_full = True
                return
            await self._create(self._rolling.template(self._sight()), pool)

    async def _let_quota_go(self) -> None:
        """Delete all pods of a job that has held quota in vain for too long: they would keep others from beginning, and
        those that wait would take what the job lets go. Pods that wait as growth make place for those that are needed.
        """
        now, staying = time.monotonic(), self._staying()
        if now >= self._quota.due and self._holders.lets_go(self._job.key, now):
            self._quota = self._quota.let_go(now, admitted(staying), self._requests.fewest_to_begin())
        request = self._queue_request()
        going = tuple(staying) if now < self._quota.until else request.outranked if request else ()
        for name in going:
            if name in self._requests.joined:
                self._release(name, f"{name} is given back: the job cannot begin with the quota that it holds")
            await self._deletions.delete(staying[name])

    async def _create(self, template: WorkerTemplate, pool: NodePool | None) -> None:
        """Creates the next worker's pod. If its name is taken, the next number is tried the next time."""
        number = self.created
        if worker_name(self._spec.name, number) in self._known():
            self.created = number + 1  # it was created, and the answer to that was lost
            return
        try:
            group = zone_group(template.job, self.pods.living().values())
            made = template.pod(number, pool, group)
            if (request := self._queue_request()) is not None:
                made = with_priority_class(made, request.priority)
            pod = await self._api.create_pod(made)
        except ApiError as error:
            if error.status != 409:
                self._refusal = PodRefused.of(error)
                raise self._refusal or error from None
            pod = await self._api.read_pod(self._job.key[0], worker_name(self._spec.name, number))
        self.created, self._refusal = number + 1, None
        if owner_uid(pod) == self._job.uid:
            self._cluster.pod_created(pod)

    # deleting

    async def _delete_ended_pods(self) -> None:
        """Deletes the pods that have ended, but for the last failed ones; and the pods of workers that were to leave
        and did not.
        """
        now, pods = time.monotonic(), self.pods.all()
        ended = {name: found for name, pod in pods.items() if (found := worker_exit(pod)) is not None}
        failed = sorted((n for n, (code, _) in ended.items() if code != 0), key=lambda n: worker_number(pods[n]) or 0)
        kept = failed[-KEPT_CRASHES:]
        for worker in ended:
            if worker not in kept and not is_deleted(pods[worker]):
                await self._deletions.delete(pods[worker])
        stopped = self._requests.wanted.stopped
        going = [w for w, pod in pods.items() if w in stopped and w not in ended and not is_deleted(pod)]
        self._stopping = {worker: self._stopping.get(worker, now) for worker in going}
        for worker, since in self._stopping.items():
            if now - since > LEAVE_SECONDS:
                self._requests.removal_forced(worker)
                await self._deletions.delete(pods[worker])

    async def _replace_unjoined(self) -> None:
        """Workers that run and do not connect are replaced; the coordinator learns of the loss from the watch."""
        recovering = self._requests.wanted.recovering  # they train, and try to connect again
        if recovering or self._recovering:
            self._recovered, self._recovering = utc_now(), recovering
            return
        for name, seconds in self._unjoined(self._recovered).items():
            pod = self.pods.all().get(name)
            if seconds > join_timeout.REPLACE_SECONDS and pod is not None and not self._deletions.asked(pod):
                message = f"{name} has run for {seconds:.0f} s and has not joined; it is replaced"
                self._record(Emit("WorkerSilent", message, True))
                await self._deletions.delete(pod)

    async def _read_startup_events(self) -> None:
        """Reads the events of pods that do not start though their status has nothing to say against it."""
        await self._startup_events.read(self._not_joined(), time.monotonic())

    # pools

    async def _move_to_fallback(self) -> None:
        """A pod that finds no node for too long is created again in a later pool."""
        if self._waiting_since is None:
            return
        for name, pod in self._unscheduled().items():
            pool, released = worker_pool(pod), self._releases.at(name)
            if pool is None or name in self._probes or self._deletions.asked(pod):
                continue
            since = max(self._waiting_since, released or 0.0)
            target = fallback_pool(self._spec.node_pools, pool, time.monotonic(), since, self.pods.by_pool())
            if target is not None:
                self._record(
                    Emit("FallbackPool", f"{name} finds no node in pool {pool}; pool {target.name} is tried", True)
                )
                await self._deletions.delete(pod)
                return  # the coordinator learns of the loss and requests another worker

    async def _roll(self) -> None:
        """Let a worker go whose pod would be made in another way now."""
        step = self._rolling.step()
        useless = self.pods.all().get(step.delete) if step.delete is not None else None
        if useless is not None:  # it may have been deleted in this very reconciliation
            await self._deletions.delete(useless)
        if step.release is None or self._backoff.holds(time.monotonic()):
            return
        if self._rolling.proven or not await self._refuses_newest():
            self._rolling.released()
            self._release(step.release, f"{step.release} is replaced: its pod would be made in another way now")

    async def _refuses_newest(self) -> bool:
        """Return whether the API server refuses a pod of the newest template, whatever else there is."""
        pool = choose_pool(self._spec.node_pools, time.monotonic(), None, self.pods.by_pool())
        try:
            await self._api.try_pod(self._rolling.template(self._sight()).pod(self.created, pool))
        except ApiError as error:
            if error.status in (400, 422):
                self._rolling.invalid(f"the API server refuses its pod: {error}")
                return True
        return False

    async def _scale_down(self) -> None:
        """Give back workers of a fallback pool once an earlier one delivers again, and workers beyond those wanted."""
        if self._rolling.progresses:
            return
        decision = scale_down(self._workers_by_pool())
        self._probes = decision.probes
        if decision.release is not None:
            self._release(decision.release, decision.reason)
        elif decision.probe is not None and self._may_ask_for_quota():
            self._probes |= {worker_name(self._spec.name, self.created)}
            await self._create(self._rolling.template(self._sight()), decision.probe)
        elif decision.delete is not None:
            await self._deletions.delete(self.pods.all()[decision.delete])

    def _workers_by_pool(self) -> WorkersByPool:
        status, gone = self._requests.status(), self._requests.wanted.gone
        by_state = {state: [w for w, found in status.workers if found is state] for state in WorkerState}
        return WorkersByPool(
            pools=self._spec.node_pools,
            placed={name: worker_pool(pod) or "" for name, pod in self.pods.living().items() if name not in gone},
            without_node={name: worker_pool(pod) or "" for name, pod in self._without_node().items()},
            joined={worker for worker, _ in status.workers},
            standby=by_state[WorkerState.STANDBY],
            leaving=by_state[WorkerState.LEAVING],
            wanted=self._requests.wanted.number,
            keep_standby=self._spec.standby.workers,
            training=status.phase == "Running",
            adding=self.adding,
            probes=self._probes,
            chosen=self._requests.wanted.chosen,
        )

    def _release(self, worker: WorkerId, message: str) -> None:
        if worker not in self._given_back:
            self._given_back.add(worker)
            self._record(Emit("GivingBack", message))
            self._requests.tell(PreemptionNotice(worker, GIVE_BACK_SECONDS, wanted=True))
