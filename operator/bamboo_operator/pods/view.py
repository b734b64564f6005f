"""The wanted and the existing pods of one job, as input of the decisions about pods.

The operator knows the pods from its watch, which may be behind. So it requests a pod's deletion again only if the pod
still exists after DELETED_SECONDS.
"""

import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from bamboo_core.coordinator.events import Status, WorkerState
from bamboo_core.coordinator.job_status import WantedWorkers
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.job.spec import JobSpec
from bamboo_core.kube.api import KubeApi
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.cluster.indices import ClusterIndices
from bamboo_operator.kube.objects import JobIdentity, owner_uid, utc_now
from bamboo_operator.manifests.worker_pod import worker_number, worker_pool
from bamboo_operator.pods.pools import are_full, choose_pool
from bamboo_operator.pods.queueing import HeldQuota, QueueRequest, next_request
from bamboo_operator.pods.rollout import RolloutStep
from bamboo_operator.pods.starting import StartBackoff, StartupProblem, gates_of
from bamboo_operator.signals.signals import lives

DELETED_SECONDS = 30.0  # after which a pod that still exists is deleted again
PodsByName = dict[WorkerId, dict[str, Any]]


class JobPods:
    """The existing pods of one job, from the operator's watch, and their deletion."""

    def __init__(self, job: JobIdentity, cluster: ClusterIndices, api: KubeApi) -> None:
        self.job, self._cluster, self._api = job, cluster, api
        self._seen: PodsByName = {}
        self._living: PodsByName = {}  # the living pods in `_seen`
        self._asked: dict[str, float] = {}  # by uid: when the pod's deletion was requested last
        self._deleted: set[str] = set()  # uids of pods whose deletion was requested, until they are gone

    def all(self) -> PodsByName:
        return self._cluster.pods(*self.job)

    def living(self) -> PodsByName:
        if (pods := self.all()) is not self._seen:
            self._seen, self._living = pods, {n: p for n, p in pods.items() if lives(p)}
        return self._living

    def next_number(self) -> int:
        """Return the lowest number above the worker numbers of all known pods; 0 without pods."""
        return max((n + 1 for pod in self.all().values() if (n := worker_number(pod)) is not None), default=0)

    def by_pool(self) -> Counter[str]:
        """Count living workers' pods by the name of their pool."""
        return Counter(worker_pool(pod) or "" for pod in self.living().values())

    def paid_for(self, joined: Collection[WorkerId]) -> Counter[str]:
        """Count living workers' pods that have a node, by the name of their pool.

        joined: workers that have joined. They have a node even if an interrupted watch does not show it.
        """
        paid = (p for n, p in self.living().items() if p["spec"].get("nodeName") or n in joined)
        return Counter(worker_pool(pod) or "" for pod in paid)

    def created(self, pod: dict[str, Any]) -> None:
        """Add a pod from the API server's answer to its creation, because the watch may be behind. Ignore another
        job's pod.
        """
        if owner_uid(pod) == self.job.uid:
            self._cluster.pod_created(pod)

    async def delete(self, pod: dict[str, Any]) -> None:
        """Delete a pod, unless that was requested in the last DELETED_SECONDS. A pod that is gone already leaves the
        cache. Raises RemoteError.
        """
        metadata, now = pod["metadata"], time.monotonic()
        self._asked = {uid: at for uid, at in self._asked.items() if now - at < DELETED_SECONDS}
        if metadata["uid"] in self._asked:
            return
        if await self._api.delete_pod(metadata["namespace"], metadata["name"], metadata["uid"]):
            self._asked[metadata["uid"]] = now
            self._deleted.add(metadata["uid"])
        else:
            self._cluster.forget_pod(pod)

    def deleted(self, *, lately: bool = False) -> frozenset[WorkerId]:
        """Return the workers whose pods still exist although this operator has requested their deletion.

        lately: only requests of the last DELETED_SECONDS, which the watch may not show yet.
        """
        names = {pod["metadata"]["uid"]: name for name, pod in self.all().items()}
        self._deleted &= names.keys()
        now = time.monotonic()
        chosen = {uid for uid, at in self._asked.items() if now - at < DELETED_SECONDS} if lately else self._deleted
        return frozenset(names[uid] for uid in chosen & names.keys())


def age(pod: dict[str, Any]) -> float:
    """Return the seconds since the pod was created."""
    created = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    return max(0.0, (utc_now() - created).total_seconds())


@dataclass(frozen=True, slots=True, kw_only=True)
class PodDemand:
    """The workers that a job's coordinator wants, and its status. joined: the workers that have connected to it."""

    wanted: WantedWorkers
    status: Status
    joined: Collection[WorkerId]


@dataclass(frozen=True, kw_only=True)  # without slots, for cached properties
class PodsView:
    """A job's pods at one moment, and the controller's notes about them. Times are of time.monotonic().

    pods: all pods; living: pods that have not ended and are not being deleted. deleted: the workers whose pods'
    deletion was requested lately. startup_events: problems from the events of pods that do not start, by their uids.
    released: when the gates of a worker's pod went away. waiting_since: the earliest time in `missing_since`. probes:
    workers that were requested only to try a pool. unjoined: seconds for which workers have run without joining.
    stopping: workers lost, refused or asked to leave that still have a living pod, and since when the controller
    knows. rollout: the next step of the rollout; rolls: workers are being replaced.
    """

    demand: PodDemand
    pods: PodsByName
    living: PodsByName
    deleted: Collection[WorkerId]
    startup_events: Mapping[str, StartupProblem]
    released: Mapping[WorkerId, float]
    waiting_since: float | None
    probes: frozenset[WorkerId]
    unjoined: Mapping[WorkerId, float]
    stopping: Mapping[WorkerId, float]
    backoff: StartBackoff
    quota: HeldQuota
    rollout: RolloutStep
    rolls: bool
    now: float

    @property
    def wanted(self) -> WantedWorkers:
        return self.demand.wanted

    @property
    def status(self) -> Status:
        return self.demand.status

    @property
    def spec(self) -> JobSpec:
        """The spec in force, also for new workers: a running job does not follow edits of its fixed fields."""
        return self.demand.wanted.spec

    @cached_property
    def not_joined(self) -> PodsByName:
        """The pods of workers that have not joined and were not declared lost or refused."""
        known = {*self.demand.joined, *self.wanted.gone}
        return {name: pod for name, pod in self.pods.items() if name not in known}

    @cached_property
    def without_node(self) -> PodsByName:
        """Living pods that wait for a node. Workers that have joined or are gone do not wait, even if an interrupted
        watch does not show their node.
        """
        return {n: p for n, p in self.not_joined.items() if n in self.living and not p["spec"].get("nodeName")}

    @cached_property
    def unscheduled(self) -> PodsByName:
        """The pods without a node and without gates, for which the scheduler looks for a node."""
        return {name: pod for name, pod in self.without_node.items() if not gates_of(pod)}

    @cached_property
    def staying(self) -> PodsByName:
        """The living pods of workers that are not lost, refused or leaving."""
        leaving = (worker for worker, state in self.status.workers if state is WorkerState.LEAVING)
        out = {*self.wanted.gone, *leaving}
        return {name: pod for name, pod in self.living.items() if name not in out}

    @cached_property
    def adding(self) -> int:
        """The number of requested workers that have no pod. A probe's pod belongs to no requested worker."""
        return max(0, self.wanted.requested - len(self.not_joined.keys() - self.probes))

    @cached_property
    def by_pool(self) -> Counter[str]:
        return Counter(worker_pool(pod) or "" for pod in self.living.values())

    @cached_property
    def queue_request(self) -> QueueRequest | None:
        """The job's next request to its queue; None if it is in no queue."""
        if self.spec.queue is None:
            return None
        grid = self.status.grid
        pipeline = len(grid[0]) if grid and grid[0] else self.spec.topology.stages
        return next_request(self.spec.queue, self.staying, self.wanted.fewest, pipeline)

    @property
    def may_ask_for_quota(self) -> bool:
        """Whether the job may create one more pod that waits in its queue; True if it is in no queue."""
        request = self.queue_request
        return request is None or (request.room > 0 and self.now >= self.quota.until)

    @property
    def may_create(self) -> bool:
        """Whether a pod is missing and neither a backoff nor the queue forbids its creation; its pool may be full."""
        return self.adding > 0 and not self.backoff.holds(self.now) and self.may_ask_for_quota

    @property
    def next_pool(self) -> NodePool | None:
        """The pool of the next pod; None if no pool has room or may take it yet, or if the job has no pools."""
        return choose_pool(self.spec.node_pools, self.now, self.waiting_since, self.by_pool)

    @property
    def pools_full(self) -> bool:
        """Whether a pod is missing only because every pool is at its maxWorkers."""
        return self.may_create and are_full(self.spec.node_pools, self.by_pool)


def missing_since(known: Mapping[WorkerId, float], view: PodsView) -> dict[WorkerId, float]:
    """Return the time since which each missing worker lacks a pod on a node, even if its pod was replaced. Keys are
    pod names or, without a pod, running numbers. Leave out workers that the queue lets wait. known: the last result.
    """
    left = sorted(at for name, at in known.items() if name not in view.pods)  # other pods take their places
    leaving = {name for name, pod in view.pods.items() if pod["metadata"].get("deletionTimestamp")}
    found = {name: at for name, at in known.items() if name in view.unscheduled or name in leaving}
    for name, pod in view.unscheduled.items():
        if name not in known:
            found[name] = left.pop(0) if left else view.released.get(name, view.now - age(pod))
    missing = view.adding if view.may_ask_for_quota else 0
    without_pod = [*left, *[view.now] * missing][:missing]
    return found | {str(number): at for number, at in enumerate(without_pod)}
