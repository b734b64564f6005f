"""One job's pods, as the operator knows them from its watch, and their deletion.

The operator deletes a pod once, because the watch may be behind, and again if the pod still exists later.
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

DELETED_SECONDS = 30.0  # after which a pod that still exists is deleted again
PodsByName = dict[WorkerId, dict[str, Any]]


class JobPods:
    def __init__(self, job: JobIdentity, cluster: ClusterIndices, api: KubeApi) -> None:
        self.job, self._cluster, self._api = job, cluster, api
        self._seen: PodsByName = {}
        self._living: PodsByName = {}  # the living pods in `_seen`
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
        """Count living workers' pods that have a node, by the name of their pool.

        joined: workers that have joined. They have a node even if an interrupted watch does not show it.
        """
        paid = (p for n, p in self.living().items() if p["spec"].get("nodeName") or n in joined)
        return Counter(worker_pool(pod) or "" for pod in paid)

    def created(self, pod: dict[str, Any]) -> None:
        """Note the API server's answer to a creation, because the watch may be behind. The pod may be another job's."""
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
        """Return the workers whose pods this operator has deleted and which still exist.

        lately: only recent deletions, which the watch may not show yet.
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
