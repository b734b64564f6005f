"""Reads again what should have changed by now: an interrupted watch may never report what it has missed."""

from collections.abc import Collection, Iterable, Mapping

from bamboo_core.kube.api import KubeApi, node_path, pod_path
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.cluster.cache import ClusterCache

FIRST_SECONDS, LAST_SECONDS = 60.0, 960.0
RECHECKS_AT_ONCE = 10


class RecheckSchedule:
    """Each object is read again after first seconds of waiting, and then less and less often, up to every last ones."""

    def __init__(self, first: float, last: float) -> None:
        self._first, self._last = first, last
        self._next: dict[str, tuple[float, float]] = {}  # when, and how long after the last time

    def due(self, waited_for: Collection[str], now: float) -> list[str]:
        """Which of those are to be read now. What is not waited for any more is forgotten."""
        new = (now + self._first, self._first)
        self._next = {key: self._next.get(key, new) for key in waited_for}
        return [key for key, (at, _) in self._next.items() if at <= now]

    def answered(self, key: str, now: float) -> None:
        """Notes that the object was read, and has not changed."""
        pause = min(2 * self._next[key][1], self._last)
        self._next[key] = (now + pause, pause)


class PodRechecks:
    """Whether the pods exist for whose workers a job's coordinator waits."""

    def __init__(self, namespace: str, cluster: ClusterCache, api: KubeApi) -> None:
        self._namespace, self._cluster, self._api = namespace, cluster, api
        self._schedule = RecheckSchedule(FIRST_SECONDS, LAST_SECONDS)

    async def read(self, waited_for: Mapping[str, WorkerId], now: float) -> None:
        """Reads the pods that are due. waited_for: their names by uid. Raises RemoteError."""
        for uid in self._schedule.due(waited_for, now)[:RECHECKS_AT_ONCE]:
            key = (self._namespace, waited_for[uid])
            there = await self._api.uid_of(pod_path(*key))
            self._schedule.answered(uid, now)
            if there != uid:
                self._cluster.forget_pod(key, uid)


class NodeLookup:
    """Whether the nodes exist on which a job's pods are, and which no listing has shown: their workers are lost if they
    were deleted before this operator began, of which no watch tells. Each is asked for once.
    """

    def __init__(self, cluster: ClusterCache, api: KubeApi) -> None:
        self._cluster, self._api = cluster, api
        self._seen: set[str] = set()

    async def read(self, nodes: Iterable[str]) -> None:
        """Raises RemoteError."""
        for name in sorted({*nodes} - self._cluster.nodes.keys() - self._seen):
            if await self._api.uid_of(node_path(name)) is None:
                self._cluster.node_missing(name)
            self._seen.add(name)
