"""The controller of one job's pods, which creates and deletes them as its coordinator wants.

Level-triggered: a failed action is tried again in the next reconciliation.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from bamboo_core.coordinator.events import Emit, Event, PreemptionNotice, RequestsWithdrawn
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import ApiError, RemoteError
from bamboo_core.names import worker_name
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.kube.attempts import PodRefused
from bamboo_operator.kube.objects import utc_now
from bamboo_operator.manifests.spread import zone_group
from bamboo_operator.manifests.worker_pod import WorkerPodSettings, network_policy, worker_number
from bamboo_operator.pods import starting
from bamboo_operator.pods.decisions import (
    DECISIONS,
    Create,
    Decision,
    Delete,
    KeepProbes,
    LetQuotaGo,
    Release,
    Replace,
    Withdraw,
    create,
    withdraw,
)
from bamboo_operator.pods.disruption_budget import REPAIR_SECONDS, DisruptionBudgetWriter
from bamboo_operator.pods.pools import choose_pool
from bamboo_operator.pods.queueing import (
    WAITING,
    HeldQuota,
    QuotaHolders,
    admitted,
    unmanaged,
    waiting_for_quota,
    with_priority_class,
)
from bamboo_operator.pods.rolling_change import RollingChange, WorkerTemplates
from bamboo_operator.pods.rollout import NOTHING
from bamboo_operator.pods.starting import (
    GATED,
    GateReleases,
    StartBackoff,
    StartupEvents,
    StartupProblem,
    failed_start,
    missing_pods,
    startup_problems,
    waits_for_quota,
)
from bamboo_operator.pods.view import JobPods, PodDemand, PodsView, missing_since
from bamboo_operator.signals.signals import is_deleted, worker_exit

PODS_AT_ONCE = 50
CREATING_SECONDS = 10.0  # for creating pods; then the reconciliation goes on to its other parts
GIVE_BACK_SECONDS = 3600.0


class PodController:
    """The controller of one job's pods.

    demand: returns the workers that the coordinator wants now. tell: makes the coordinator handle an event at once.
    forced: called before the deletion of a pod whose worker did not exit. created: how many workers the job has had.
    record: takes events for the user. made: when the job was created (seconds since 1970). resumed: whether an earlier
    coordinator began the training, so that workers may still train. holders: the operator's jobs that hold quota in
    vain.
    """

    def __init__(
        self,
        pods: JobPods,
        api: KubeApi,
        *,
        demand: Callable[[], PodDemand],
        tell: Callable[[Event], None],
        forced: Callable[[WorkerId], None],
        settings: WorkerPodSettings,
        record: Callable[[Emit], None],
        created: int,
        resumed: bool,
        made: float,
        holders: QuotaHolders,
    ) -> None:
        self._pods, self._api = pods, api
        self._demand, self._tell, self._forced = demand, tell, forced
        self._made, self._holders = made, holders
        self._quota = HeldQuota(uid=pods.job.uid)
        self._settings, self._record = settings, record
        self.created = max(created, pods.next_number())
        self.rolling = RollingChange(WorkerTemplates(pods.job.uid, settings), record)
        self._waits: dict[WorkerId, float] = {}  # as `missing_since` returns them
        self._releases = GateReleases(demand().wanted.spec)
        self._given_back: set[WorkerId] = set()
        self._probes: frozenset[WorkerId] = frozenset()
        self._began = self._recovered = utc_now()
        self._recovering = False
        self._backoff = StartBackoff()
        self._failed_starts = {name for name, pod in pods.all().items() if failed_start(pod)}
        self._stopping: dict[WorkerId, float] = {}
        self._startup_events = StartupEvents(pods.job.key[0], api)
        self._joined_before: set[WorkerId] = set()
        self._repair_at = -math.inf if settings.network_policy else math.inf  # the network policy; time.monotonic()
        self._budget: DisruptionBudgetWriter | None = None
        if settings.disruption_budgets:
            fresh = created == 0 and not resumed
            self._budget = DisruptionBudgetWriter(api, pods.job.uid, record, fresh=fresh)
        self._refusal: PodRefused | None = None  # why the API server refused the newest pod
        self._reported: set[str] = set()  # reasons of startup problems
        self.problems: tuple[StartupProblem, ...] = ()  # why workers do not start, by the last look
        self._execute: dict[type, Callable[[Any], Awaitable[None]]] = {
            Withdraw: self._withdraw,
            Create: self._create,
            Delete: self._delete,
            Release: self._release,
            Replace: self._replace,
            KeepProbes: self._keep_probes,
            LetQuotaGo: self._let_quota_go,
        }

    async def reconcile(self) -> None:
        """Bring the pods, the network policy and the disruption budget up to date; stop as soon as the job is over.

        Raises the last RemoteError; the next reconciliation repeats the failed parts.
        """
        await asyncio.sleep(0)  # the coordinator first handles pending events, such as an edit
        await self._carry_out(withdraw)
        self._observe()
        failed: Exception | None = None
        parts: tuple[Callable[[], Awaitable[None]], ...] = (
            self._apply_network_policy,
            self._update_disruption_budget,
            *(partial(self._carry_out, decide) for decide in DECISIONS),
            self._read_startup_events,
        )
        for part in parts:
            if self._demand().status.phase == "Over":
                break  # the clean-up deletes the remaining pods
            try:
                await part()
            except RemoteError as error:
                failed = error
        if failed is not None:
            raise failed

    async def end(self) -> None:
        """Clear `problems` and remove the disruption budget of a job that has stopped training; `PodRemoval`
        deletes its pods. Raises RemoteError.
        """
        self.problems = ()
        if self._budget is not None:
            await self._budget.remove(self.view().spec)

    def close(self) -> None:
        """Take the job off the list of quota holders, so that no other job waits for it to give quota back."""
        self._holders.forget(self._pods.job.key)

    def note_problems(self) -> None:
        """Update `problems`, the reasons why workers do not start, and record an event for each new reason."""
        view = self.view()
        backoff = self._backoff if self._backoff.holds(view.now) else None
        missing = missing_pods(view.adding, backoff, refused=str(self._refusal or ""), pools_full=view.pools_full)
        unrequested = 0 if view.may_ask_for_quota else view.adding
        late = starting.join_problem(
            starting.seconds_unjoined(view.living, view.demand.joined, self._began, utc_now()),
            self._settings.coordinator_url,
        )
        self.problems = (
            *missing,
            *startup_problems(view.not_joined, view.startup_events),
            *self._quota.problem(view.now),
            *waiting_for_quota(view.not_joined, unrequested),
            *([late] if late else []),
        )
        for problem in self.problems:
            if problem.reason not in self._reported:
                waits = problem.reason in (GATED, WAITING)
                self._record(Emit(problem.reason, problem.message, not waits))
        self._reported = {problem.reason for problem in self.problems}

    @property
    def unmanaged(self) -> str:
        """The reason why the job's queue has no effect, as a sentence; "" if it works, or without a queue or pods."""
        return unmanaged(self.view().spec, self._pods.living().values())

    def view(self) -> PodsView:
        """Return the wanted and the existing pods, as decisions see them."""
        demand, pods, living = self._demand(), self._pods.all(), self._pods.living()
        gates = {name: at for name in living if (at := self._releases.at(name)) is not None}
        view = PodsView(
            demand=demand,
            pods=pods,
            living=living,
            deleted=self._pods.deleted(lately=True),
            startup_events=self._startup_events.problems,
            released=gates,
            waiting_since=min(self._waits.values(), default=None),
            probes=self._probes,
            unjoined=starting.seconds_unjoined(living, demand.joined, self._recovered, utc_now()),
            stopping=self._stopping,
            backoff=self._backoff,
            quota=self._quota,
            rollout=NOTHING,
            rolls=self.rolling.progresses,
            now=time.monotonic(),
        )
        return replace(view, rollout=self.rolling.step(view))

    def _observe(self) -> None:
        """Update the controller's notes that later decisions need, such as gates, quota, waits and failed starts."""
        self.created = max(self.created, self._pods.next_number())  # the answer to a creation may have been lost
        view = self.view()
        self._releases.observe(view.without_node, view.now)
        self._look_at_quota(view)
        view = self.view()
        now, wanted, joined = view.now, view.wanted, set(view.demand.joined)
        self._waits = missing_since(self._waits, view)
        if joined - self._joined_before:
            self._joined_before, self._backoff = joined, StartBackoff()
        candidates = view.pods.keys() - self._joined_before
        failed = {name: how for name in candidates if (how := failed_start(view.pods[name]))}
        if wanted.misfit is not None:  # that worker ends, and its successor may be refused, too
            failed |= dict([wanted.misfit])
        for name in failed.keys() - self._failed_starts:
            number = worker_number(view.pods.get(name) or {}) or 0
            self._backoff = self._backoff.after(number, self.created, now, f"{name} {failed[name]}")
            self._failed_starts.add(name)
        going = [n for n, p in view.pods.items() if n in wanted.stopped and not (worker_exit(p) or is_deleted(p))]
        self._stopping = {worker: self._stopping.get(worker, now) for worker in going}
        if wanted.recovering or self._recovering:
            self._recovered, self._recovering = utc_now(), wanted.recovering
        self.rolling.look(view)

    def _look_at_quota(self, view: PodsView) -> None:
        """Note whether the job holds quota for too few workers to begin, while its other pods wait for quota."""
        phase, staying = view.status.phase, view.staying
        waits = phase in ("Pending", "Restoring") and any(map(waits_for_quota, staying.values()))
        in_vain = waits and 0 < admitted(staying) < view.wanted.fewest
        self._quota = self._quota.look(in_vain=in_vain, trains=phase == "Running", now=view.now)
        if in_vain:
            self._holders.note(self._pods.job.key, (self._made, self._pods.job.uid))
        else:
            self.close()

    # observations and upkeep

    async def _apply_network_policy(self) -> None:
        """Write the NetworkPolicy, unless it is disabled or was written in the last REPAIR_SECONDS. This restores a
        deleted policy, which the operator does not watch; without it the workers' ports are open.
        """
        if (now := time.monotonic()) >= self._repair_at:
            await self._api.apply_network_policy(network_policy(self.view().spec, self._pods.job.uid))
            self._repair_at = now + REPAIR_SECONDS

    async def _update_disruption_budget(self) -> None:
        if self._budget is not None:
            view = self.view()
            joined = {worker for worker, _ in view.status.workers}
            pods = (pod for name, pod in view.living.items() if name in joined)
            numbers = sorted(number for pod in pods if (number := worker_number(pod)) is not None)
            await self._budget.update(view.status, view.spec, numbers)

    async def _read_startup_events(self) -> None:
        """Read the events of pods that do not start and whose status gives no reason."""
        await self._startup_events.read(self.view().not_joined, time.monotonic())

    # execution of decisions

    async def _carry_out(self, decide: Decision) -> None:
        """Execute the actions of one decision, unless the job is over. Repeat `create` for each pod, because fewer pods
        may be wanted by then, until PODS_AT_ONCE pods are created or CREATING_SECONDS have passed.
        """
        end = time.monotonic() + CREATING_SECONDS
        for _ in range(PODS_AT_ONCE if decide is create else 1):
            view = self.view()
            if time.monotonic() > end or view.status.phase == "Over":
                return
            actions = tuple(decide(view))
            for action in actions:
                await self._execute[type(action)](action)
            if not actions:
                return

    async def _withdraw(self, action: Withdraw) -> None:
        self._tell(RequestsWithdrawn(action.count))

    async def _create(self, action: Create) -> None:
        """Create the next worker's pod. If an earlier attempt has created it, use that pod; if its worker has joined or
        is gone by now, only count it.
        """
        number, view = self.created, self.view()
        name = worker_name(view.spec.name, number)
        if action.probe:
            self._probes |= {name}
        if name in view.demand.joined or name in view.wanted.gone:
            self.created = number + 1  # it was created, and the answer to that was lost
            return
        group = zone_group(view.spec, view.living.values())
        try:
            made = self.rolling.templates.pod(view.spec, number, action.pool, group)
            if view.queue_request is not None:
                made = with_priority_class(made, view.queue_request.priority)
            pod = await self._api.create_pod(made)
        except ApiError as error:
            if error.status != 409:
                self._refusal = PodRefused.of(error)
                raise self._refusal or error from None
            pod = await self._api.read_pod(self._pods.job.key[0], name)
        self.created, self._refusal = number + 1, None
        self._pods.created(pod)

    async def _delete(self, action: Delete) -> None:
        if action.event is not None:
            self._record(action.event)
        if action.forced:
            self._forced(action.worker)
        if (pod := self._pods.all().get(action.worker)) is not None:
            await self._pods.delete(pod)

    async def _release(self, action: Release) -> None:
        if action.worker not in self._given_back:
            self._given_back.add(action.worker)
            self._record(Emit("GivingBack", action.message))
            self._tell(PreemptionNotice(action.worker, GIVE_BACK_SECONDS, wanted=True))

    async def _replace(self, action: Replace) -> None:
        if self.rolling.proven or not await self._refuses_newest():
            self.rolling.released()
            message = f"{action.worker} is replaced: its pod would be made in another way now"
            await self._release(Release(action.worker, message))

    async def _refuses_newest(self) -> bool:
        """Return whether the API server rejects a pod of the newest template as invalid (400, 422) in a dry run; if
        so, note the reason in the rollout.
        """
        view = self.view()
        pool = choose_pool(view.spec.node_pools, view.now, None, view.by_pool)
        try:
            await self._api.try_pod(self.rolling.templates.pod(view.spec, self.created, pool))
        except ApiError as error:
            if error.status in (400, 422):
                self.rolling.invalid(f"the API server refuses its pod: {error}")
                return True
        return False

    async def _keep_probes(self, action: KeepProbes) -> None:
        self._probes = action.workers

    async def _let_quota_go(self, _: LetQuotaGo) -> None:
        view = self.view()
        if self._holders.lets_go(self._pods.job.key, view.now):
            self._quota = self._quota.let_go(view.now, admitted(view.staying), view.wanted.fewest)
