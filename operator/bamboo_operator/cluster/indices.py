"""The cache of pods and nodes in kopf's indices, and the listeners that it notifies of changes."""

from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, Protocol

import kopf
from kopf._cogs.structs.ids import HandlerId
from kopf._core.engines.indexing import Index, OperatorIndexer, OperatorIndexers  # for operators that embed kopf

from bamboo_core.kube.api import Object
from bamboo_operator.cluster.resync import Known
from bamboo_operator.kube.objects import JobKey, job_of, owner_uid

PODS, PODS_ON, NODES = map(HandlerId, ("pods", "pods_on", "nodes"))  # pods by job, their names by node, nodes by name
REMEMBERED = 1000  # deleted pods: far more than can be deleted during one API call


class PodListener(Protocol):
    """A listener for changes of a job's pods and their nodes."""

    def pod_changed(self, name: str) -> None: ...

    def pod_deleted(self, pod: Object) -> None: ...

    def node_deleted(self, pod: str, node: str) -> None: ...


class ClusterIndices:
    """The cache of pods and nodes, filled by kopf. It notifies a job's listener of changes to the job's pods and nodes.

    kopf sees neither the API server's answers to calls nor deletions while a watch is interrupted. `pod_created`,
    `forget_pod` and the resync bring these changes into the cache.
    """

    def __init__(self) -> None:
        self.indexers = OperatorIndexers()
        self.indexers.update((kind, OperatorIndexer()) for kind in (PODS, PODS_ON, NODES))
        self._owned: dict[JobKey, dict[str, dict[str, Object]]] = {}  # pods by owner's uid and by name, built on demand
        self._listeners: dict[JobKey, PodListener] = {}
        self._deleted: deque[str] = deque(maxlen=REMEMBERED)  # uids of pods

    # index functions for kopf

    def by_job(self, pod: Mapping[str, Any]) -> dict[JobKey, Object]:
        return {job: _trimmed_pod(pod)} if (job := self._job_of(pod)) else {}

    def by_node(self, pod: Mapping[str, Any]) -> dict[str, tuple[JobKey, str]]:
        node, job = (pod.get("spec") or {}).get("nodeName"), self._job_of(pod)
        return {node: (job, pod["metadata"]["name"])} if node and job else {}

    def by_name(self, node: Mapping[str, Any]) -> dict[str, Object]:
        return {node["metadata"]["name"]: _trimmed_node(node)}

    def _job_of(self, pod: Mapping[str, Any]) -> JobKey | None:
        """Return the pod's job; None if it has none, or if this cache knows that the pod was deleted."""
        return None if pod["metadata"]["uid"] in self._deleted else job_of(pod)

    def _index(self, kind: HandlerId) -> Index[Any, Any]:
        return self.indexers[kind].index  # kopf replaces the index when it starts

    # queries

    def pods(self, job: JobKey, uid: str) -> dict[str, Object]:
        """Return the pods of the job with that UID, by name, without the pods of other jobs of the same name.

        The result is the same object until a pod changes, or a new {} if no job of that name has pods.
        """
        if (pods := self._index(PODS).get(job)) is None:
            return {}
        owned = self._owned.setdefault(job, {})
        if uid not in owned:
            owned[uid] = {pod["metadata"]["name"]: pod for pod in pods if owner_uid(pod) == uid}
        return owned[uid]

    def owner_of(self, job: JobKey, pod_uid: str) -> str | None:
        """Return the UID of the BambooJob that owns the pod; "" if none owns it, None if the pod is unknown."""
        pods = self._index(PODS).get(job, ())
        return next((owner_uid(pod) or "" for pod in pods if pod["metadata"]["uid"] == pod_uid), None)

    def belongs_to_another_job(self, job: JobKey, uid: str, pod_uid: str) -> bool:
        """Return whether the pod belongs to another job of that name, or to none; False if the pod is unknown."""
        return self.owner_of(job, pod_uid) not in (None, uid)

    def node(self, name: str) -> Object | None:
        """Return the node of that name, the newest one if several are known; None if there is none."""
        return next(reversed([*self._index(NODES).get(name, ())]), None)

    def node_of(self, pod: Object) -> Object | None:
        return self.node((pod.get("spec") or {}).get("nodeName") or "")

    # changes reported by the watches

    def pod_changed(self, pod: Mapping[str, Any]) -> None:
        """Notify the job's listener that the pod has changed in the indices."""
        if (job := self._job_of(pod)) is not None:
            self._owned.pop(job, None)
            if listener := self.listener_of(job):
                listener.pod_changed(pod["metadata"]["name"])

    def pod_deleted(self, pod: Mapping[str, Any]) -> None:
        """Notify the job's listener once that a pod is gone, unless a new pod has its name. The cache ignores the
        deleted pod's UID from now on.
        """
        job = self._job_of(pod)
        self._deleted.append(pod["metadata"]["uid"])
        if job is not None:
            self._owned.pop(job, None)
            replaced = pod["metadata"]["name"] in self.pods(job, owner_uid(pod) or "")
            if not replaced and (listener := self.listener_of(job)):
                listener.pod_deleted(_trimmed_pod(pod))

    def node_changed(self, name: str) -> None:
        """Notify listeners with pods on that node that the node has changed in the index."""
        for listener, pod in self._listening(name):
            listener.pod_changed(pod)

    def node_deleted(self, name: str) -> None:
        """Notify listeners with pods on that node that it is gone, unless the index has a new node of that name."""
        if self.node(name) is None:
            for listener, pod in self._listening(name):
                listener.node_deleted(pod, name)

    # changes that no watch has reported

    def known_pods(self) -> Known:
        return {pod["metadata"]["uid"]: partial(self.forget_pod, pod) for pod in self._values(PODS)}

    def known_nodes(self) -> Known:
        """Return the functions to call when a node is gone, by the UIDs and the names of all known nodes.

        The names include nodes that were deleted before this operator began, which only their pods still name.
        """
        known = {node["metadata"]["uid"]: partial(self._forget_node, node) for node in self._values(NODES)}
        names = self._index(PODS_ON).keys() | self._index(NODES).keys()
        return known | {name: partial(self.node_deleted, name) for name in names}

    def _values(self, kind: HandlerId) -> Iterator[Object]:
        return chain.from_iterable(self._index(kind).values())

    def forget_pod(self, pod: Object) -> None:
        """Remove a deleted pod whose deletion no watch has reported yet, and notify the job's listener."""
        self._discard(pod)
        self.pod_deleted(pod)

    def _forget_node(self, node: Object) -> None:
        self._discard(node)
        self.node_deleted(node["metadata"]["name"])

    def _discard(self, thing: Any) -> None:
        self.indexers.discard(kopf.Body(thing))

    def pod_created(self, pod: Any) -> None:
        """Add a pod from the API server's answer to its creation, unless the watch has already reported the pod or its
        deletion.
        """
        job, uid = self._job_of(pod), pod["metadata"]["uid"]
        if job and all(known["metadata"]["uid"] != uid for known in self._index(PODS).get(job, ())):
            self.indexers[PODS].replace(self.indexers.make_key(kopf.Body(pod)), self.by_job(pod))
            self.pod_changed(pod)

    # listeners

    def add_listener(self, job: JobKey, listener: PodListener) -> None:
        self._listeners[job] = listener

    def listener_of(self, job: JobKey) -> PodListener | None:
        """Return the listener for the job's pods; None if there is none."""
        return self._listeners.get(job)

    def remove_listener(self, job: JobKey, listener: PodListener) -> None:
        """Remove the listener, unless another one has taken its place."""
        if self.listener_of(job) is listener:
            del self._listeners[job]

    def _listening(self, node: str) -> Iterator[tuple[PodListener, str]]:
        for job, pod in sorted(self._index(PODS_ON).get(node, ())):
            if (listener := self.listener_of(job)) is not None:
                yield listener, pod


def _trimmed_pod(pod: Mapping[str, Any]) -> Object:
    keep = (
        "name",
        "namespace",
        "uid",
        "labels",
        "ownerReferences",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "creationTimestamp",
    )
    spec = pod.get("spec") or {}
    kept = ("nodeName", "schedulingGates", "terminationGracePeriodSeconds")
    return {
        "metadata": {key: pod["metadata"][key] for key in keep if key in pod["metadata"]},
        "spec": {key: spec[key] for key in kept if key in spec}
        | {"containers": [{key: c.get(key) for key in ("name", "image")} for c in spec.get("containers") or ()]},
        "status": dict(pod.get("status") or {}),
    }


def _trimmed_node(node: Mapping[str, Any]) -> Object:
    """Return the node's fields that may hold signals, without the fields that each heartbeat of the kubelet changes."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    metadata = node["metadata"]
    conditions = [
        {key: c[key] for key in ("type", "status", "reason", "message") if key in c}
        for c in status.get("conditions") or ()
    ]
    keep = ("name", "uid", "labels", "annotations", "deletionTimestamp")
    return {
        "metadata": {key: metadata[key] for key in keep if key in metadata},
        "spec": {"taints": list(spec.get("taints") or ()), "unschedulable": bool(spec.get("unschedulable"))},
        "status": {"conditions": conditions},
    }
