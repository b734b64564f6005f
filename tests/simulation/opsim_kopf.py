"""A stand-in for kopf, which passes changes to the operator's handlers and indices at once, without a watch."""

from collections.abc import Coroutine
from typing import Any

import kopf

from bamboo_core.kube.api import KubeApi
from bamboo_core.names import GROUP, PLURAL, VERSION
from bamboo_operator.auth.pod_tokens import TokenReviewer
from bamboo_operator.auth.worker_gateway import WorkerGateway
from bamboo_operator.cluster.indices import NODES, PODS, PODS_ON, ClusterIndices
from bamboo_operator.jobs.shared import SharedResources
from bamboo_operator.manifests.worker_pod import WorkerPodSettings

Object = dict[str, Any]
RESOURCES = {
    "pods": kopf.Resource("", "v1", "pods"),
    "nodes": kopf.Resource("", "v1", "nodes"),
    "bamboojobs": kopf.Resource(GROUP, VERSION, PLURAL),
}


def pod_event(cluster: ClusterIndices, kind: str | None, pod: Object) -> None:
    """Apply a change of a pod to the indices, and notify their listeners. kind: the event's type, such as DELETED."""
    if kind == "DELETED":
        cluster.indexers.discard(kopf.Body(pod))
        cluster.pod_deleted(pod)
        return
    key = cluster.indexers.make_key(kopf.Body(pod))
    cluster.indexers[PODS].replace(key, cluster.by_job(pod))
    cluster.indexers[PODS_ON].replace(key, cluster.by_node(pod))
    cluster.pod_changed(pod)


def node_event(cluster: ClusterIndices, kind: str | None, node: Object) -> None:
    """Apply a node's event to the indices, and notify listeners if the node changed. kind: such as DELETED."""
    if kind == "DELETED":
        cluster.indexers.discard(kopf.Body(node))
        cluster.node_deleted(node["metadata"]["name"])
        return
    before = cluster.node(node["metadata"]["name"])
    cluster.indexers[NODES].replace(cluster.indexers.make_key(kopf.Body(node)), cluster.by_name(node))
    if cluster.node(node["metadata"]["name"]) is not before:
        cluster.node_changed(node["metadata"]["name"])


def shared_for(api: KubeApi, **more: Any) -> SharedResources:
    """Return the resources that an operator's jobs share: empty indices, a new gateway, or what `more` has instead."""
    usual = {"cluster": ClusterIndices(), "gateway": WorkerGateway(), "url": "ws://operator"}
    settings = WorkerPodSettings(coordinator_url="", image="trainer")
    return SharedResources(
        **{"api": api, "reviews": TokenReviewer(api), "key": b"k" * 16, "settings": settings, **usual, **more}
    )


class KopfEvents:
    """A stand-in for kopf: calls a registry's handlers, and fills the cluster's indices."""

    def __init__(self, registry: Any, cluster: ClusterIndices) -> None:
        self._cluster = cluster
        indices, watches, changes = registry._indexing, registry._watching, registry._changing  # noqa: SLF001
        self._indices, self._watches, self._changes = (
            [(one.selector, one.id, getattr(one, "reason", None), one.fn) for one in each.get_all_handlers()]
            for each in (indices, watches, changes)
        )
        self._memos: dict[str, kopf.Memo] = {}
        self._handled: dict[str, int] = {}  # generations, by UID

    def show(self, kind: str, change: str | None, thing: Object) -> None:
        """Update the indices; then call event handlers and, for a new generation, creation or update handlers."""
        metadata, body = thing["metadata"], kopf.Body(thing)
        uid = metadata["uid"]
        facts = {
            "body": body,
            "name": metadata["name"],
            "type": change,
            "memo": self._memos.setdefault(uid, kopf.Memo()),
        }
        if change == "DELETED":
            self._cluster.indexers.discard(body)
            del self._memos[uid]
        else:
            key = self._cluster.indexers.make_key(body)
            for name, fn in self._of(self._indices, kind):
                self._cluster.indexers[name].replace(key, at_once(fn(**facts)))
        for _, fn in self._of(self._watches, kind):
            at_once(fn(**facts))
        generation = metadata.get("generation", 0)
        if change != "DELETED" and "deletionTimestamp" not in metadata and self._handled.get(uid) != generation:
            reason = "update" if uid in self._handled else "create"
            self._handled[uid] = generation
            for _, fn in self._of(self._changes, kind, reason):
                at_once(fn(**facts))

    @staticmethod
    def _of(handlers: list[Any], kind: str, reason: str | None = None) -> list[Any]:
        found = [one for one in handlers if one[0].check(RESOURCES[kind]) and (reason is None or one[2] == reason)]
        return [(name, fn) for _, name, _, fn in found]


def at_once(handler: Coroutine[Any, Any, Any]) -> Any:
    """Run a handler that must not wait, and return its result. Raises AssertionError if it waits."""
    try:
        handler.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a handler waits")
