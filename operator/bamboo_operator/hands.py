"""Brings the pods of one job to what its coordinator wants. Level-triggered: a pass that fails is simply made again."""

import asyncio
import logging
import time
from collections import Counter, deque
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from bamboo.coordinator.events import Emit, WorkerState
from bamboo.coordinator.membership import surplus_requests
from bamboo.job.spec import JobSpec, NodePool, wanted_workers
from bamboo.names import API_VERSION, KIND, worker_name
from bamboo.planning.plan import WorkerId
from bamboo_operator import silence
from bamboo_operator.api import API_ERRORS, Api, ApiError, PodRefused, pod_place
from bamboo_operator.backoff import Backoff
from bamboo_operator.brain import Brain, Running
from bamboo_operator.budget import Budget
from bamboo_operator.cluster import Cluster, owner_uid
from bamboo_operator.doors import JobKey
from bamboo_operator.doubts import Doubts
from bamboo_operator.gates import Releases, gates
from bamboo_operator.network_policy import network_policy
from bamboo_operator.pods import (
    JobMeta,
    OperatorSettings,
    worker_image,
    worker_number,
    worker_pod,
    worker_pool,
)
from bamboo_operator.pools import choose_pool, move_to, pool_to_try, reverts
from bamboo_operator.signals import is_deleted, lives, worker_exit
from bamboo_operator.surplus import surplus
from bamboo_operator.troubles import GATED, Trouble, cannot_start, troubles

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 10.0  # for a worker that was told to stop, before its pod is deleted
KEPT_CRASHES = 10  # pods of workers that ended by themselves, for their logs
EVENTS_A_PASS, PODS_A_PASS, ASKED_A_PASS = 20, 50, 10
MAKING_SECONDS = 10.0  # and then the rest of the pass
GIVE_BACK_SECONDS = 3600.0
LONGEST_REFUSAL = 1000
DELETED_SECONDS = 30.0  # after which a pod that is still there is deleted again
COMPONENT = "bamboo-operator"


class Hands:
    """created: how many workers the job has had, by its status."""

    def __init__(
        self, job: Running, brain: Brain, cluster: Cluster, api: Api, settings: OperatorSettings, created: int
    ) -> None:
        self._job, self._brain, self._cluster, self._api, self._settings = job, brain, cluster, api, settings
        self._meta = JobMeta(uid=job.uid)
        self.created = max(created, self._numbered())
        if image := worker_image(self._living()):  # NB: the operator's default may have changed with its version
            self._settings = replace(settings, image=image)
        self._waiting_since: float | None = None
        self._releases = Releases(job.spec)
        self._given_back: set[WorkerId] = set()
        self._probes: set[WorkerId] = set()  # asked for only to see whether an earlier pool has nodes again
        self._began = self._recovered = datetime.now(UTC)
        self._backoff = Backoff()
        self._doubts = Doubts()
        self._seen: set[WorkerId] = set()  # those that had joined when we looked last
        self._guarded = not settings.network_policy
        fresh = created == 0 and not job.resumed
        self._budget = Budget(api, self._meta, brain.story.append, fresh=fresh) if settings.disruption_budgets else None
        self._deleted: dict[str, float] = {}  # by uid: when
        self._full = False  # pods are wanted, and no pool may have more
        self._refusal: PodRefused | None = None  # of the newest pod that was to be made
        self._told: set[str] = set()  # reasons of troubles

    async def work(self) -> None:
        """One pass. Raises the last of what is in API_ERRORS; what was not done is done in the next pass."""
        await asyncio.sleep(0)  # NB: first the coordinator takes in what it has been told, such as an edit
        self._look()
        failed: Exception | None = None
        for part in (
            self._guard,
            self._limit,
            self._make,
            self._remove,
            self._replace,
            self._ask,
            self._move,
            self._give_back,
        ):
            if self._brain.finish is not None:
                break  # whose pods are left then is for the clean-up
            try:
                await part()
            except API_ERRORS as error:
                failed = error
        if failed is not None:
            raise failed

    def troubles(self) -> tuple[Trouble, ...]:
        """Why workers do not start; a reason that is new is told."""
        found = troubles(self._pods())
        if self._full:
            message = f"{self.adding} worker(s) are not requested: every node pool is at its maxWorkers"
            found = (Trouble("PoolsFull", message), *found)
        if self.adding and self._refusal:
            message = f"{self.adding} worker(s) have no pod, which the API server refuses: {self._refusal.message}"
            found = (Trouble("PodsRefused", message[:LONGEST_REFUSAL]), *found)
        if self.adding and self._backoff.holds(time.monotonic()):
            message = f"workers end before they have joined ({self._backoff.detail}); the next ones are requested"
            found = (Trouble("StartBackOff", f"{message} {self._backoff.pause:g} s after the last"), *found)
        if late := silence.trouble(self._silent(self._began), self._settings.coordinator_url):
            found = (*found, late)
        for trouble in found:
            if trouble.reason not in self._told:
                self._brain.story.append(Emit(trouble.reason, trouble.message, trouble.reason != GATED))
        self._told = {trouble.reason for trouble in found}
        return found

    @property
    def _spec(self) -> JobSpec:
        """The one in force: what is fixed while the job runs is so for new workers, too."""
        return self._brain.state.spec

    @property
    def adding(self) -> int:
        """Pods that are wanted and not there."""
        return max(0, self._brain.state.requested - len(self._coming().keys() - self._probes))

    def _coming(self) -> dict[str, dict[str, Any]]:
        """The pods of workers that have not joined, and may."""
        known = self._brain.joined | self._brain.state.gone
        return {name: pod for name, pod in self._pods().items() if name not in known}

    def _withdraw(self) -> None:
        if count := min(self.adding, surplus_requests(self._brain.state)):
            self._brain.withdraw(count)

    def by_pool(self) -> Counter[str]:
        """Living workers' pods by the name of their pool."""
        return Counter(worker_pool(pod) or "" for pod in self._living().values())

    def paid_for(self) -> Counter[str]:
        """The same, but only those that have a node."""
        return Counter(worker_pool(p) or "" for p in self._living().values() if p["spec"].get("nodeName"))

    def _pods(self) -> dict[str, dict[str, Any]]:
        return self._cluster.pods(self._job.key, self._job.uid)

    def _living(self) -> dict[str, dict[str, Any]]:
        return {n: p for n, p in self._pods().items() if lives(p)}

    def _waiting(self) -> dict[str, dict[str, Any]]:
        """Those that have no node yet."""
        return {n: p for n, p in self._living().items() if not p["spec"].get("nodeName")}

    def _looking(self) -> dict[str, dict[str, Any]]:
        """Those of them for which the scheduler looks for one."""
        return {n: p for n, p in self._waiting().items() if not gates(p)}

    def _numbered(self) -> int:
        """The first number that no pod has, as far as is known."""
        return max((n + 1 for pod in self._pods().values() if (n := worker_number(pod)) is not None), default=0)

    def _look(self) -> None:
        pods, now = self._pods(), time.monotonic()
        self.created = max(self.created, self._numbered())  # NB: the answer to a making may be lost
        self._withdraw()
        self._releases.look(self._waiting(), now)
        if not self._looking() and not self.adding:
            self._waiting_since = None
        elif self._waiting_since is None:
            released = {name: self._releases.at(name) for name in self._looking()}
            since = (now - _age(pods[name]) if at is None else at for name, at in released.items())
            self._waiting_since = min(since, default=now)
        if self._brain.joined - self._seen:
            self._seen, self._backoff = set(self._brain.joined), Backoff()
        for name, detail in self._brain.unborn:
            number = worker_number(pods.get(name) or {}) or 0
            self._backoff = self._backoff.after(number, self.created, now, detail)
        self._brain.unborn.clear()

    async def _guard(self) -> None:
        """Who may connect to the workers."""
        if not self._guarded:
            await self._api.create_network_policy(network_policy(self._spec, self._meta))
            self._guarded = True

    async def _limit(self) -> None:
        """How many workers a drain may take."""
        if self._budget is not None:
            placed = sum(1 for p in self._living().values() if p["spec"].get("nodeName") and not cannot_start(p))
            await self._budget.keep(self._brain.status(), self._spec, placed)

    async def end(self) -> None:
        """The job trains no more; its pods are for others to remove. Raises what is in API_ERRORS."""
        if self._budget is not None:
            await self._budget.end(self._spec)

    # making

    async def _make(self) -> None:
        self._full = False
        end = time.monotonic() + MAKING_SECONDS
        for _ in range(PODS_A_PASS):
            self._withdraw()  # NB: fewer may be wanted since the last one was made
            now = time.monotonic()
            if not self.adding or self._brain.finish is not None or self._backoff.holds(now) or now > end:
                return
            pools = self._spec.node_pools
            pool = choose_pool(pools, time.monotonic(), self._waiting_since, self.by_pool())
            if pools and pool is None:
                self._full = True
                return
            await self._create(pool)

    async def _create(self, pool: NodePool | None) -> None:
        """Or not, if the name is taken; then the next number is tried."""
        number = self.created
        if worker_name(self._spec.name, number) in self._brain.joined | self._brain.state.gone:
            self.created = number + 1  # NB: it was made, and the answer to that was lost
            return
        wanted = worker_pod(self._spec, self._meta, number, pool, self._settings)
        try:
            pod = await self._api.create_pod(wanted)
        except ApiError as error:
            if error.status != 409:
                self._refusal = PodRefused.of(error)
                raise self._refusal or error from None
            pod = await self._api.read_pod(self._job.key[0], worker_name(self._spec.name, number))
        self.created, self._refusal = number + 1, None
        if owner_uid(pod) == self._job.uid:
            self._cluster.pod_made(pod)

    # removing

    async def _remove(self) -> None:
        """Pods that have ended, but for the last failed ones; and those of workers that were to leave and did not."""
        now, pods = time.monotonic(), self._pods()
        ended = {name: found for name, pod in pods.items() if (found := worker_exit(pod)) is not None}
        failed = sorted((n for n, (code, _) in ended.items() if code != 0), key=lambda n: worker_number(pods[n]) or 0)
        kept = failed[-KEPT_CRASHES:]
        for worker in ended:
            if worker not in kept and not is_deleted(pods[worker]):
                await self._delete(pods[worker])
        for worker, since in list(self._brain.removing.items()):
            if worker not in pods or worker in ended or is_deleted(pods[worker]):
                del self._brain.removing[worker]
            elif now - since > LEAVE_SECONDS:
                self._brain.removed.add(worker)
                await self._delete(pods[worker])
                del self._brain.removing[worker]

    def _silent(self, since: datetime) -> dict[WorkerId, float]:
        return silence.silent(self._living(), self._brain.joined, since, datetime.now(UTC))

    async def _replace(self) -> None:
        """Workers that run and never come are made anew; the coordinator hears of the loss."""
        if self._brain.state.phase == "Recovering":  # NB: they train, and look for the way back
            self._recovered = datetime.now(UTC)
        for name, seconds in self._silent(self._recovered).items():
            if seconds > silence.REPLACED_SECONDS:
                message = f"{name} has run for {seconds:.0f} s and has not joined; it is replaced"
                self._brain.story.append(Emit("WorkerSilent", message, True))
                if pod := self._pods().get(name):
                    await self._delete(pod)

    async def _ask(self) -> None:
        """Whether the pods are there for whose workers the coordinator waits."""
        waited_for = {pod["metadata"]["uid"]: name for name, pod in self._coming().items()}
        for uid in self._doubts.due(waited_for, time.monotonic())[:ASKED_A_PASS]:
            key = (self._job.key[0], waited_for[uid])
            there = await self._api.uid_of(pod_place(*key))
            self._doubts.asked(uid, time.monotonic())
            if there != uid:
                self._cluster.pod_missed(key, uid)

    async def _delete(self, pod: dict[str, Any]) -> None:
        """Once: the watch may be a while behind."""
        metadata, now = pod["metadata"], time.monotonic()
        self._deleted = {uid: at for uid, at in self._deleted.items() if now - at < DELETED_SECONDS}
        if metadata["uid"] in self._deleted:
            return
        if await self._api.delete_pod(metadata["namespace"], metadata["name"], metadata["uid"]):
            self._deleted[metadata["uid"]] = now
        else:
            self._cluster.pod_missed((metadata["namespace"], metadata["name"]), metadata["uid"])

    # pools

    async def _move(self) -> None:
        """A pod that finds no node for too long is made anew in a later pool."""
        if self._waiting_since is None:
            return
        for name, pod in self._looking().items():
            pool, released = worker_pool(pod), self._releases.at(name)
            if pool is None or name in self._probes:
                continue
            since = max(self._waiting_since, released or 0.0)
            target = move_to(self._spec.node_pools, pool, time.monotonic(), since, self.by_pool())
            if target is not None:
                self._brain.story.append(
                    Emit("FallbackPool", f"{name} finds no node in pool {pool}; pool {target.name} is tried", True)
                )
                await self._delete(pod)
                return  # NB: the coordinator hears of the loss and asks for another one

    async def _give_back(self) -> None:
        """Workers of a fallback pool once an earlier one has nodes again, and workers that are not wanted any more.

        Whether there are nodes again is only known by asking for one more worker there.
        """
        spec, status = self._spec, self._brain.status()
        pools, gone, wanted = spec.node_pools, self._brain.state.gone, wanted_workers(self._spec)
        placed = {name: worker_pool(pod) or "" for name, pod in self._living().items() if name not in gone}
        joined = {w for w, _ in status.workers}
        standby = [w for w, state in status.workers if state is WorkerState.STANDBY]
        leaving = [w for w, state in status.workers if state is WorkerState.LEAVING]
        counts = Counter(placed.values())
        if not any(pool.revert and counts[pool.name] for pool in pools):
            self._probes.clear()
        elif status.phase == "Running":
            if worker := reverts(pools, placed, standby, leaving, spec.standby.workers):
                self._probes -= joined
                self._release(worker, f"pool {placed[worker]} is no longer needed; {worker} is released")
                return
            waiting = Counter(worker_pool(pod) or "" for pod in self._waiting().values())
            target = pool_to_try(pools, counts, waiting)
            # NB: a worker that leaves counts, too: one at a time
            if target is not None and not self.adding and len(placed) <= wanted:
                self._probes.add(worker_name(spec.name, self.created))
                await self._create(target)
                return
        self._probes &= placed.keys()
        counted = {name: pool for name, pool in placed.items() if name not in self._probes}
        late = [name for name in self._waiting() if name not in joined]
        worker = surplus(pools, counted, late, standby, leaving, wanted)
        if worker in late:
            await self._delete(self._pods()[worker])
        elif worker is not None:
            self._release(worker, f"{worker} is released: {wanted} workers are wanted")

    def _release(self, worker: WorkerId, message: str) -> None:
        if worker not in self._given_back:
            self._given_back.add(worker)
            self._brain.story.append(Emit("GivingBack", message))
            self._brain.give_back(worker, GIVE_BACK_SECONDS)


def _age(pod: dict[str, Any]) -> float:
    """Seconds since the pod was made."""
    made = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    return max(0.0, (datetime.now(UTC) - made).total_seconds())


async def post(api: Api, job: tuple[JobKey, str], story: deque[Emit]) -> None:
    """What is to be told, as Kubernetes events of that job. Raises what is in API_ERRORS."""
    for _ in range(min(EVENTS_A_PASS, len(story))):
        emit = story[0]
        try:
            await api.create_event(_event(job, emit))
        except ApiError as error:
            if error.status in (403, 429) or error.status >= 500 or error.reason == "NotJson":
                raise  # NB: an API server that has just started forbids everything for a moment
            _drop(story, emit)  # it will never be taken
            raise
        _drop(story, emit)


def _drop(story: deque[Emit], emit: Emit) -> None:
    """NB: a story that is full has lost its first part by itself when something new came."""
    if story and story[0] is emit:
        story.popleft()


def _event(job: tuple[JobKey, str], emit: Emit) -> dict[str, Any]:
    now = datetime.now(UTC)
    stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    (namespace, name), uid = job
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{name[:200]}.", "namespace": namespace},
        "involvedObject": {
            "apiVersion": API_VERSION, "kind": KIND, "namespace": namespace, "name": name, "uid": uid,
        },
        "reason": emit.reason[:128],
        "message": emit.message[:1000],
        "type": "Warning" if emit.warning else "Normal",
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": COMPONENT,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }  # fmt: skip
