"""Informer caches of pods and nodes, reduced to what is needed; and which jobs are told of changes."""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from bamboo_core.kube.api import Object
from bamboo_operator.cluster.resync import Known
from bamboo_operator.kube.objects import JobKey, job_of, owner_uid

REMEMBERED = 1000  # far more than can be deleted while one answer is on its way


class PodListener(Protocol):
    """What is told of a job's pods and their nodes."""

    def pod_changed(self, name: str) -> None: ...

    def pod_deleted(self, pod: Object) -> None: ...

    def node_deleted(self, pod: str, node: str) -> None: ...


class ClusterCache:
    """Fed by watches. A node's event reaches only the jobs that have pods there."""

    def __init__(self) -> None:
        self.nodes: dict[str, Object] = {}
        self._pods: dict[JobKey, dict[str, Object]] = defaultdict(dict)
        self._owned: dict[JobKey, dict[str, dict[str, Object]]] = {}  # the same by the owner's uid, as asked for
        self._placed: dict[str, set[tuple[JobKey, str]]] = defaultdict(set)  # by node
        self._listeners: dict[JobKey, PodListener] = {}
        self._deleted: deque[str] = deque(maxlen=REMEMBERED)  # uids of pods and nodes

    def add_listener(self, job: JobKey, listener: PodListener) -> None:
        self._listeners[job] = listener

    def listener_of(self, job: JobKey) -> PodListener | None:
        """Who is told of the job's pods, if anybody is."""
        return self._listeners.get(job)

    def remove_listener(self, job: JobKey, listener: PodListener) -> None:
        """Unless another one has taken its place."""
        if self.listener_of(job) is listener:
            del self._listeners[job]

    def pods(self, job: JobKey, uid: str) -> dict[str, Object]:
        """The pods of that very job, not of one that had the name before, by name. The same object until one has
        changed.
        """
        if (pods := self._pods.get(job)) is None:
            return {}
        owned = self._owned.setdefault(job, {})
        if uid not in owned:
            owned[uid] = {name: pod for name, pod in pods.items() if owner_uid(pod) == uid}
        return owned[uid]

    def belongs_to_another_job(self, job: JobKey, uid: str, pod_uid: str) -> bool:
        """Is that a pod of a job that had the name before, or has it now?"""
        pods = self._pods.get(job, {}).values()
        return any(pod["metadata"]["uid"] == pod_uid and owner_uid(pod) != uid for pod in pods)

    def pod_uids(self) -> dict[tuple[str, str], str]:
        """The uids of the pods of all jobs, by namespace and name."""
        return {
            (job[0], name): pod["metadata"]["uid"] for job, pods in self._pods.items() for name, pod in pods.items()
        }

    def known_pods(self) -> Known:
        return {uid: partial(self.forget_pod, key, uid) for key, uid in self.pod_uids().items()}

    def known_nodes(self) -> Known:
        """By name those that only their pods know: deleted, maybe, before this operator began."""
        known = {node["metadata"]["uid"]: partial(self.forget_node, name) for name, node in self.nodes.items()}
        return known | {name: partial(self.node_missing, name) for name in self._placed.keys() - self.nodes.keys()}

    def forget_pod(self, key: tuple[str, str], uid: str) -> None:
        """Forget that very pod, which is known to be deleted, though no watch has reported it yet."""
        namespace, name = key
        named = (pods[name] for job, pods in self._pods.items() if job[0] == namespace and name in pods)
        pod = next(named, None)
        if pod is not None and uid == pod["metadata"]["uid"]:
            self.pod_event("DELETED", pod)

    def forget_node(self, name: str) -> None:
        self.node_event("DELETED", self.nodes[name])

    def node_missing(self, name: str) -> None:
        """There is none of that name, or none any more."""
        for listener, pod in self._listening(name):
            listener.node_deleted(pod, name)

    def node_of(self, pod: Object) -> Object | None:
        return self.nodes.get((pod.get("spec") or {}).get("nodeName") or "")

    def pod_created(self, pod: Mapping[str, Any]) -> None:
        """The API server's answer to its creation; the watch may have reported more before that, even its deletion."""
        job, uid = job_of(pod), pod["metadata"]["uid"]
        if job is None:
            return
        known = self._pods.get(job, {}).get(pod["metadata"]["name"])
        if uid not in self._deleted:
            if known is None or known["metadata"]["uid"] != uid:
                self.pod_event("ADDED", pod)
        elif listener := self.listener_of(job):
            listener.pod_deleted(_trimmed_pod(pod))

    def pod_event(self, kind: str | None, pod: Mapping[str, Any]) -> None:
        """Takes in a change of a pod. kind: ADDED, MODIFIED, DELETED, or None for what was there before."""
        job, name = job_of(pod), pod["metadata"]["name"]
        if job is None:
            return
        before = self._pods.get(job, {}).get(name)
        if kind == "DELETED":
            self._deleted.append(pod["metadata"]["uid"])
            if before is None or before["metadata"].get("uid") != pod["metadata"].get("uid"):
                return  # a later pod of that name has come already
        elif pod["metadata"]["uid"] in self._deleted:
            return  # it was found to be deleted before the watch reported it
        self._owned.pop(job, None)
        if before is not None and (node := before["spec"].get("nodeName")):
            self._placed[node].discard((job, name))
            if not self._placed[node]:
                del self._placed[node]
        listener = self.listener_of(job)
        if kind == "DELETED":
            del self._pods[job][name]
            if not self._pods[job]:
                del self._pods[job]
            if listener and before is not None:
                listener.pod_deleted(before)
            return
        kept = self._pods[job][name] = _trimmed_pod(pod)
        if node := kept["spec"].get("nodeName"):
            self._placed[node].add((job, name))
        if listener:
            listener.pod_changed(name)

    def node_event(self, kind: str | None, node: Mapping[str, Any]) -> None:
        name = node["metadata"]["name"]
        if kind == "DELETED":
            self._deleted.append(node["metadata"].get("uid", ""))
            known = self.nodes.get(name)
            if known is not None and known["metadata"].get("uid") != node["metadata"].get("uid"):
                return  # a new node has that name
            self.nodes.pop(name, None)
            self.node_missing(name)
            return
        before, after = self.nodes.get(name), _trimmed_node(node)
        if before == after:
            return
        self.nodes[name] = after
        for listener, pod in self._listening(name):
            listener.pod_changed(pod)

    def _listening(self, node: str) -> Iterator[tuple[PodListener, str]]:
        for job, pod in sorted(self._placed.get(node, ())):
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
    """The node without what changes at every heartbeat of the kubelet."""
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
