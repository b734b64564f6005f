"""One job's pods, as far as the operator has heard of them, and their deletion.

A pod is deleted once: the watch may be a while behind. One that is still there later is deleted again.
"""

import time
from collections import Counter
from collections.abc import Collection
from datetime import datetime
from typing import Any

from bamboo_core.kube.api import KubeApi
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.cluster.indices import ClusterIndices
from bamboo_operator.kube.objects import JobIdentity, owner_uid, utc_now
from bamboo_operator.manifests.worker_pod import worker_number, worker_pool
from bamboo_operator.signals.signals import lives

DELETED_SECONDS = 30.0  # after which a pod that is still there is deleted again
PodsByName = dict[WorkerId, dict[str, Any]]


class JobPods:
    def __init__(self, job: JobIdentity, cluster: ClusterIndices, api: KubeApi) -> None:
        self.job, self._cluster, self._api = job, cluster, api
        self._seen: PodsByName = {}
        self._living: PodsByName = {}  # of those
        self._asked: dict[str, float] = {}  # by uid: when the pod's deletion was requested last
        self._deleted: set[str] = set()  # uids of all pods that were deleted, until they are gone

    def all(self) -> PodsByName:
        return self._cluster.pods(*self.job)

    def living(self) -> PodsByName:
        if (pods := self.all()) is not self._seen:
            self._seen, self._living = pods, {n: p for n, p in pods.items() if lives(p)}
        return self._living

    def next_number(self) -> int:
        """Return the first number that no known pod has."""
        return max((n + 1 for pod in self.all().values() if (n := worker_number(pod)) is not None), default=0)

    def by_pool(self) -> Counter[str]:
        """Count living workers' pods by the name of their pool."""
        return Counter(worker_pool(pod) or "" for pod in self.living().values())

    def paid_for(self, joined: Collection[WorkerId]) -> Counter[str]:
        """Count living workers' pods that have a node, by the name of their pool. joined: workers, who have one, though
        a watch that is interrupted has not told so.
        """
        paid = (p for n, p in self.living().items() if p["spec"].get("nodeName") or n in joined)
        return Counter(worker_pool(pod) or "" for pod in paid)

    def created(self, pod: dict[str, Any]) -> None:
        """Note the API server's answer to a creation; the watch may be behind. The pod may be another job's."""
        if owner_uid(pod) == self.job.uid:
            self._cluster.pod_created(pod)

    async def delete(self, pod: dict[str, Any]) -> None:
        """Delete a pod, unless its deletion is under way. Raises RemoteError."""
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
        """Return the workers whose pods this operator has deleted, and which are still there. lately: only those of
        whose deletion the watch need not have told yet.
        """
        there = {pod["metadata"]["uid"]: name for name, pod in self.all().items()}
        self._deleted &= there.keys()
        now = time.monotonic()
        chosen = {uid for uid, at in self._asked.items() if now - at < DELETED_SECONDS} if lately else self._deleted
        return frozenset(there[uid] for uid in chosen & there.keys())


def age(pod: dict[str, Any]) -> float:
    """Seconds since the pod was created."""
    created = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    return max(0.0, (utc_now() - created).total_seconds())
