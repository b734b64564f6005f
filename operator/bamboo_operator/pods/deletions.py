"""Deletes a job's pods, each once: the watch may be a while behind. One that is still there later is deleted again."""

import math
import time
from typing import Any

from bamboo_core.kube.api import KubeApi
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.cluster.cache import ClusterCache
from bamboo_operator.pods.job_pods import JobPods

DELETED_SECONDS = 30.0  # after which a pod that is still there is deleted again


class PodDeletions:
    """The deletions of one job's pods."""

    def __init__(self, pods: JobPods, cluster: ClusterCache, api: KubeApi) -> None:
        self._pods, self._cluster, self._api = pods, cluster, api
        self._asked: dict[str, float] = {}  # by uid: when
        self._ordered: set[str] = set()  # uids of all pods that were deleted, until they are gone

    def ordered(self) -> frozenset[WorkerId]:
        """Return the workers whose pods this operator has deleted, and which are still there."""
        there = {pod["metadata"]["uid"]: name for name, pod in self._pods.all().items()}
        self._ordered &= there.keys()
        return frozenset(there[uid] for uid in self._ordered)

    def asked(self, pod: dict[str, Any]) -> bool:
        """Is its deletion under way, of which the watch need not have told yet?"""
        at = self._asked.get(pod["metadata"]["uid"], -math.inf)
        return time.monotonic() - at < DELETED_SECONDS

    async def delete(self, pod: dict[str, Any]) -> None:
        """Raises RemoteError."""
        if self.asked(pod):
            return
        metadata, now = pod["metadata"], time.monotonic()
        self._asked = {uid: at for uid, at in self._asked.items() if now - at < DELETED_SECONDS}
        if await self._api.delete_pod(metadata["namespace"], metadata["name"], metadata["uid"]):
            self._asked[metadata["uid"]] = now
            self._ordered.add(metadata["uid"])
        else:
            self._cluster.forget_pod(pod)
