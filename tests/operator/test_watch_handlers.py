"""kopf's processing of events with the operator's handlers and settings."""

import asyncio
from typing import Any, cast

import kopf
from kopf._core.actions.lifecycles import all_at_once
from kopf._core.reactor.inventory import ResourceMemories
from kopf._core.reactor.processing import process_resource_event

from bamboo_core.kube.api import KubeApi
from bamboo_core.names import LABEL_JOB_NAME
from bamboo_operator.jobs.controller import JobController
from bamboo_operator.jobs.shared import SharedResources
from bamboo_operator.watch_handlers import kopf_settings, watch_handlers
from operator_kit import Heard
from opsim_kopf import RESOURCES, shared_for
from watched_api_kit import KEY, LATE, Server, body


class Uncopied(dict[str, Any]):
    """A part of an object that raises AssertionError if kopf deep-copies it."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("it was copied")


class Recorded(JobController):
    """A controller that records the calls of the handlers."""

    def __init__(self, shared: SharedResources) -> None:
        super().__init__(shared)
        self.said: list[tuple[str, Any]] = []
        self.generations: dict[str, int] = {}  # by UID

    def begin(self, body: Any) -> None:
        self._say("begin", body)

    def edited(self, body: Any) -> None:
        self._say("edited", body)

    def _say(self, what: str, body: Any) -> None:
        self.generations[body["metadata"]["uid"]] = body["metadata"]["generation"]
        self.said.append((what, body["metadata"]["generation"]))

    def handled_generation(self, body: Any) -> int | None:
        return self.generations.get(body["metadata"]["uid"])

    def end(self, body: Any, *, gone: bool) -> None:
        self.said.append(("end", gone))


class Kopf:
    """kopf's processing of events, without an API server."""

    def __init__(self, jobs: JobController, shared: SharedResources) -> None:
        self._handlers, self._indexers = watch_handlers(jobs, shared), shared.cluster.indexers
        self._indexers.ensure(self._handlers._indexing.get_all_handlers())
        self._settings, self._memories = kopf_settings(jobs), ResourceMemories()

    async def event(self, kind: str, change: str | None, thing: Any) -> None:
        await process_resource_event(
            lifecycle=all_at_once,
            indexers=self._indexers,
            registry=self._handlers,
            settings=self._settings,
            memories=self._memories,
            memobase=kopf.Memo(),
            resource=RESOURCES[kind],
            event_queue=asyncio.Queue(),
            raw_event=cast(Any, {"type": change, "object": thing}),
        )


def node(heartbeat: str = "1", **taint: str) -> dict[str, Any]:
    metadata = {"name": "n1", "uid": "n", "managedFields": Uncopied()}
    conditions = [{"type": "Ready", "status": "True", "lastHeartbeatTime": heartbeat}]
    taints = [taint] if taint else []
    return {"kind": "Node", "metadata": metadata, "spec": Uncopied(taints=taints), "status": {"conditions": conditions}}


def pod(phase: str) -> dict[str, Any]:
    labels = {LABEL_JOB_NAME: KEY[1]}
    metadata = {"name": "w0", "namespace": KEY[0], "uid": "p", "labels": labels, "ownerReferences": []}
    return {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": "n1"}, "status": {"phase": phase}}


async def test_of_a_job_its_edits_are_handled_and_its_deletion() -> None:
    """The controller hears of a new job, its edits and its deletion, but not of changes of its status."""
    shared = shared_for(KubeApi(Server()))
    jobs = Recorded(shared)
    kopfs = Kopf(jobs, shared)
    job = body("u1")
    written = {**job, "status": {"state": "Running"}}
    edited = {**written, "metadata": {**job["metadata"], "generation": 2}}
    deleted = {**edited, "metadata": {**edited["metadata"], "generation": 3, "deletionTimestamp": LATE}}
    for change, thing in ((None, job), ("MODIFIED", written), ("MODIFIED", edited), (None, edited)):
        await kopfs.event("bamboojobs", change, thing)
    for change in ("MODIFIED", "DELETED"):
        await kopfs.event("bamboojobs", change, deleted)
    await kopfs.event("bamboojobs", "ADDED", body("u2"))
    await jobs.stop()
    assert jobs.said == [("begin", 1), ("edited", 2), ("end", False), ("end", True), ("begin", 1)]
    assert shared.counts.watched == {"job": 7}


async def test_pods_and_nodes_are_in_the_indices_when_jobs_hear_of_them() -> None:
    """kopf deep-copies no nodes, and a heartbeat of the kubelet does not count as a change."""
    shared = shared_for(KubeApi(Server()))
    jobs, cluster, heard = Recorded(shared), shared.cluster, Heard()
    kopfs = Kopf(jobs, shared)
    cluster.add_listener(KEY, heard)
    await kopfs.event("pods", None, pod("Pending"))
    for heartbeat, taint in (("1", {}), ("2", {}), ("3", {"key": "going"})):
        await kopfs.event("nodes", "MODIFIED", node(heartbeat, **taint))
    assert heard.said == [("changed", "w0")] * 3
    (kept,) = (cluster.node("n1"),)
    assert kept is not None
    assert kept["spec"]["taints"] == [{"key": "going"}]
    await kopfs.event("nodes", "DELETED", node())
    await kopfs.event("pods", "DELETED", pod("Running"))
    assert heard.said[3:] == [("without n1", "w0"), ("deleted", "w0")]
    assert (cluster.known_pods(), cluster.known_nodes()) == ({}, {})
    await jobs.stop()
