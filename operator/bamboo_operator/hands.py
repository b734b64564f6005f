"""Brings the pods of one job to what its coordinator wants. Level-triggered: a pass that fails is simply made again."""

import logging
import time
from collections import Counter, deque
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from bamboo.events import Emit, WorkerState
from bamboo.names import API_VERSION, KIND
from bamboo.plan import WorkerId
from bamboo.spec import JobSpec, NodePool
from bamboo_operator.api import API_ERRORS, Api, ApiError
from bamboo_operator.brain import Brain, Running
from bamboo_operator.cluster import Cluster, owner_uid
from bamboo_operator.pods import JobMeta, OperatorSettings, worker_name, worker_number, worker_pod, worker_pool
from bamboo_operator.pools import choose_pool, move_to, pool_to_try, reverts
from bamboo_operator.signals import worker_exit

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 10.0  # for a worker that was told to stop, before its pod is deleted
KEPT_CRASHES = 10  # pods of workers that ended by themselves, for their logs
EVENTS_A_PASS = 20
REVERT_SECONDS = 3600.0
COMPONENT = "bamboo-operator"


class Hands:
    """created: how many workers the job has had, by its status."""

    def __init__(
        self, job: Running, brain: Brain, cluster: Cluster, api: Api, settings: OperatorSettings, created: int
    ) -> None:
        self._job, self._brain, self._cluster, self._api, self._settings = job, brain, cluster, api, settings
        self._meta = JobMeta(uid=job.uid)
        numbers = (worker_number(pod) for pod in self._pods().values())
        self.created = max((n + 1 for n in numbers if n is not None), default=0)
        self.created = max(self.created, created)
        self._made: dict[str, str] = {}  # pods that no watch has shown yet, and their pools
        self._waiting_since: float | None = None
        self._given_back: set[WorkerId] = set()
        self._probes: set[WorkerId] = set()  # asked for only to see whether an earlier pool has nodes again

    async def work(self) -> None:
        """One pass. Raises the last of what is in API_ERRORS; what was not done is done in the next pass."""
        self._look()
        failed: Exception | None = None
        for part in (self._make, self._remove, self._move, self._revert):
            try:
                await part()
            except API_ERRORS as error:
                failed = error
        if failed is not None:
            raise failed

    def edit(self, spec: JobSpec) -> None:
        self._job = replace(self._job, spec=spec)

    def by_pool(self) -> Counter[str]:
        """Living workers' pods by the name of their pool."""
        pools = [worker_pool(pod) or "" for pod in self._living().values()]
        return Counter([*pools, *self._made.values()])

    def paid_for(self) -> Counter[str]:
        """The same, but only those that have a node."""
        return Counter(worker_pool(p) or "" for p in self._living().values() if p["spec"].get("nodeName"))

    def _pods(self) -> dict[str, dict[str, Any]]:
        return self._cluster.pods(self._job.key, self._job.uid)

    def _living(self) -> dict[str, dict[str, Any]]:
        return {n: p for n, p in self._pods().items() if worker_exit(p) is None and not _deleted(p)}

    def _waiting(self) -> dict[str, dict[str, Any]]:
        """Those that have no node yet."""
        return {n: p for n, p in self._living().items() if not p["spec"].get("nodeName")}

    def _look(self) -> None:
        pods = self._pods()
        self._made = {name: pool for name, pool in self._made.items() if name not in pods}
        if not self._waiting() and not self._made and not self._brain.adding:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = time.monotonic()

    # making

    async def _make(self) -> None:
        while self._brain.adding > 0:
            pools = self._job.spec.node_pools
            pool = choose_pool(pools, time.monotonic(), self._waiting_since, self.by_pool())
            if pools and pool is None:
                return  # every pool is full
            if await self._create(pool):
                self._brain.adding -= 1

    async def _create(self, pool: NodePool | None) -> bool:
        """False if the name belongs to somebody else; the next number is tried then."""
        number = self.created
        pod = worker_pod(self._job.spec, self._meta, number, pool, self._settings)
        name = worker_name(self._job.spec.name, number)
        mine = True
        try:
            await self._api.create_pod(pod)
        except ApiError as error:
            if error.status != 409:
                raise
            mine = owner_uid(await self._api.read_pod(self._job.key[0], name)) == self._job.uid
        self.created = number + 1
        if mine:
            self._made[name] = pool.name if pool else ""
        return mine

    # removing

    async def _remove(self) -> None:
        now, pods = time.monotonic(), self._pods()
        for worker, since in list(self._brain.removing.items()):
            pod = pods.get(worker)
            if pod is None or _deleted(pod):
                del self._brain.removing[worker]
            elif (ended := worker_exit(pod)) is not None:
                if ended[0] == 0 or not self._may_keep(pods):
                    await self._delete(pod)
                del self._brain.removing[worker]
            elif now - since > LEAVE_SECONDS:
                await self._delete(pod)
                del self._brain.removing[worker]

    def _may_keep(self, pods: dict[str, dict[str, Any]]) -> bool:
        return sum(worker_exit(pod) is not None for pod in pods.values()) <= KEPT_CRASHES

    async def _delete(self, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        await self._api.delete_pod(metadata["namespace"], metadata["name"], metadata["uid"])

    # pools

    async def _move(self) -> None:
        """A pod that finds no node for too long is made anew in a later pool."""
        if self._waiting_since is None:
            return
        for name, pod in self._waiting().items():
            pool = worker_pool(pod)
            if pool is None or name in self._probes:
                continue
            target = move_to(self._job.spec.node_pools, pool, time.monotonic(), self._waiting_since, self.by_pool())
            if target is not None:
                self._brain.story.append(
                    Emit("FallbackPool", f"{name} finds no node in pool {pool}; pool {target.name} is tried", True)
                )
                await self._delete(pod)
                return  # NB: the coordinator hears of the loss and asks for another one

    async def _revert(self) -> None:
        """Back to an earlier pool: one more worker is asked for there, and then one of the fallback's is given back."""
        pools, status = self._job.spec.node_pools, self._brain.status()
        if not any(pool.revert for pool in pools) or status.phase != "Running":
            return
        placed = {name: worker_pool(pod) or "" for name, pod in self._living().items()}
        standby = [w for w, state in status.workers if state is WorkerState.STANDBY]
        leaving = [w for w, state in status.workers if state is WorkerState.LEAVING]
        worker = reverts(pools, placed, standby, leaving, self._job.spec.standby.workers)
        if worker is not None and worker not in self._given_back:
            self._given_back.add(worker)
            self._brain.give_back(worker, REVERT_SECONDS)
            return
        waiting = Counter(worker_pool(pod) or "" for pod in self._waiting().values())
        target = pool_to_try(pools, self.by_pool(), waiting + Counter(self._made.values()))
        if target is not None and not self._brain.adding and len(standby) <= self._job.spec.standby.workers:
            self._probes.add(worker_name(self._job.spec.name, self.created))
            await self._create(target)


def _deleted(pod: dict[str, Any]) -> bool:
    return pod["metadata"].get("deletionTimestamp") is not None


async def post(api: Api, job: Running, story: deque[Emit]) -> None:
    """What is to be told, as Kubernetes events of the job."""
    for _ in range(min(EVENTS_A_PASS, len(story))):
        await api.create_event(_event(job, story[0]))
        story.popleft()


def _event(job: Running, emit: Emit) -> dict[str, Any]:
    now = datetime.now(UTC)
    stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    namespace, name = job.key
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{name[:200]}.", "namespace": namespace},
        "involvedObject": {
            "apiVersion": API_VERSION, "kind": KIND, "namespace": namespace, "name": name, "uid": job.uid,
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
