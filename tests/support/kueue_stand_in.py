"""Kueue's Workloads on a cluster without Kueue: their CRDs, reduced to what is used, and a stand-in for the manager."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from cluster.client import ApiError, Client, Json
from kueue_manager import GROUP, Manager

VERSION = "v1beta2"
CYCLE_SECONDS = 0.2
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
ANY: Json = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties}


def _named(key: str, **properties: Json) -> Json:
    """A list of objects that are told apart by that field."""
    kinds = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return {"type": "array", "items": {**_object(**properties), "required": [key]}, **kinds}


CONDITIONS = _named(
    "type", type=TEXT, status=TEXT, reason=TEXT, message=TEXT, lastTransitionTime=TEXT, observedGeneration=WHOLE
)
WORKLOAD = _object(
    spec=_object(
        queueName=TEXT,
        priority=WHOLE,
        priorityClassRef=_object(group=TEXT, kind=TEXT, name=TEXT),
        active={"type": "boolean", "default": True},
        podSets=_named("name", name=TEXT, count=WHOLE, minCount=WHOLE, template=ANY),
    ),
    status=_object(
        conditions=CONDITIONS,
        admission=_object(clusterQueue=TEXT, podSetAssignments=_named("name", name=TEXT, count=WHOLE, flavors=ANY)),
        reclaimablePods=_named("name", name=TEXT, count=WHOLE),
    ),
)


def _crd(kind: str, plural: str, schema: Json, *, namespaced: bool) -> Json:
    served = {"name": VERSION, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{GROUP}",
            "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/kueue"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced" if namespaced else "Cluster",
            "names": {"kind": kind, "plural": plural},
            "versions": [{**served, "subresources": {"status": {}}}],
        },
    }


KINDS = (
    _crd("Workload", "workloads", WORKLOAD, namespaced=True),
    _crd("ResourceFlavor", "resourceflavors", _object(spec=ANY), namespaced=False),
    _crd("WorkloadPriorityClass", "workloadpriorityclasses", _object(value=WHOLE), namespaced=False),
)


@contextmanager
def workloads_served(api: Client) -> Iterator[None]:
    """The cluster serves them, and forgets them afterwards: operators of other tests follow no queues."""
    for crd in KINDS:
        api.create(crd)
    try:
        for crd in KINDS:
            api.wait(f"{CRDS}/{crd['metadata']['name']}", _established)
        yield
    finally:
        for crd in KINDS:
            api.delete(f"{CRDS}/{crd['metadata']['name']}")


def _established(found: Json) -> bool:
    conditions = (found.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


class StandIn:
    """A manager of the Workloads of one namespace, in a thread. quota: pods; it may be changed."""

    def __init__(self, api: Client, namespace: str, quota: int) -> None:
        self._api, self.manager = api, Manager(quota)
        self._path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/workloads"
        self._stopping = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"queue of {namespace}", daemon=True)

    def __enter__(self) -> "StandIn":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        print(*self.manager.log, sep="\n")
        if self._error is not None:
            raise self._error

    @property
    def used(self) -> int:
        """The pods whose quota is held."""
        return self.manager.used(self.workloads())

    def workloads(self) -> list[Json]:
        found: list[Json] = self._api.get(self._path)["items"]
        return found

    def _run(self) -> None:
        try:
            while not self._stopping.wait(CYCLE_SECONDS):
                for changed in self.manager.step(self.workloads(), datetime.now(UTC)):
                    self._write(changed)
        except Exception as error:
            self._error = error

    def _write(self, workload: Json) -> None:
        """What has changed meanwhile, or is gone, is looked at in the next cycle."""
        try:
            self._api.request("PUT", f"{self._path}/{workload['metadata']['name']}/status", workload)
        except ApiError as error:
            if error.code not in (404, 409):
                raise
