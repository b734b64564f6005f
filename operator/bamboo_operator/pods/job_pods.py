"""One job's pods, as far as the operator has heard of them from the watch."""

from collections import Counter
from collections.abc import Collection
from datetime import datetime
from typing import Any

from bamboo_core.planning.plan import WorkerId
from bamboo_operator.cluster.cache import ClusterCache
from bamboo_operator.kube.objects import JobIdentity, utc_now
from bamboo_operator.manifests.worker_pod import worker_number, worker_pool
from bamboo_operator.pods.starting.scheduling_gates import gates_of
from bamboo_operator.signals.signals import lives

PodsByName = dict[WorkerId, dict[str, Any]]


class JobPods:
    def __init__(self, job: JobIdentity, cluster: ClusterCache) -> None:
        self._job, self._cluster = job, cluster
        self._seen: PodsByName = {}
        self._living: PodsByName = {}  # of those

    def all(self) -> PodsByName:
        return self._cluster.pods(*self._job)

    def living(self) -> PodsByName:
        if (pods := self.all()) is not self._seen:
            self._seen, self._living = pods, {n: p for n, p in pods.items() if lives(p)}
        return self._living

    def without_node(self, known: Collection[WorkerId]) -> PodsByName:
        """Living ones that wait for a node. known: workers that have joined or are gone, whose pods wait for none,
        though a watch that is interrupted has not told so.
        """
        return {n: p for n, p in self.living().items() if not p["spec"].get("nodeName") and n not in known}

    def unscheduled(self, known: Collection[WorkerId]) -> PodsByName:
        """Those for which the scheduler looks for a node."""
        return {n: p for n, p in self.without_node(known).items() if not gates_of(p)}

    def next_number(self) -> int:
        """The first number that no pod has, as far as is known."""
        return max((n + 1 for pod in self.all().values() if (n := worker_number(pod)) is not None), default=0)

    def by_pool(self) -> Counter[str]:
        """Living workers' pods by the name of their pool."""
        return Counter(worker_pool(pod) or "" for pod in self.living().values())

    def paid_for(self, joined: Collection[WorkerId]) -> Counter[str]:
        """Living workers' pods that have a node, by the name of their pool. joined: workers, who have one, though a
        watch that is interrupted has not told so.
        """
        paid = (p for n, p in self.living().items() if p["spec"].get("nodeName") or n in joined)
        return Counter(worker_pool(pod) or "" for pod in paid)


def age(pod: dict[str, Any]) -> float:
    """Seconds since the pod was created."""
    created = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    return max(0.0, (utc_now() - created).total_seconds())
