"""kopf's settings, the handlers of its watch events and indices, and a filter for its log."""

import logging
from typing import Any

import kopf

from bamboo_core.names import GROUP, KIND, LABEL_JOB_NAME, PLURAL, VERSION
from bamboo_operator.cluster.indices import NODES, PODS, PODS_ON
from bamboo_operator.jobs.controller import JobController
from bamboo_operator.jobs.shared import SharedResources

NOT_FOUND = 404
JOBS, OURS = (GROUP, VERSION, PLURAL), {LABEL_JOB_NAME: kopf.PRESENT}


def watch_handlers(jobs: JobController, shared: SharedResources) -> kopf.OperatorRegistry:
    """Return the operator's kopf handlers. kopf completes the indices before it calls a handler of watch events."""
    handlers, cluster = kopf.OperatorRegistry(), shared.cluster

    @kopf.on.startup(registry=handlers)
    async def startup(**_: Any) -> None:
        jobs.start()

    @kopf.on.cleanup(registry=handlers)
    async def cleanup(**_: Any) -> None:
        await jobs.stop()

    @kopf.index("v1", "pods", id=PODS, registry=handlers, labels=OURS)
    async def pods(body: kopf.Body, **_: Any) -> Any:
        return cluster.by_job(body)

    @kopf.index("v1", "pods", id=PODS_ON, registry=handlers, labels=OURS)
    async def pods_on(body: kopf.Body, **_: Any) -> Any:
        return cluster.by_node(body)

    @kopf.index("v1", "nodes", id=NODES, registry=handlers)
    async def nodes(body: kopf.Body, **_: Any) -> Any:
        return cluster.by_name(body)

    @kopf.on.create(*JOBS, registry=handlers)
    async def job(body: kopf.Body, **_: Any) -> None:
        jobs.begin(dict(body))

    @kopf.on.update(*JOBS, field="spec", registry=handlers)
    async def job_edited(body: kopf.Body, **_: Any) -> None:
        jobs.edited(dict(body))

    @kopf.on.event(*JOBS, registry=handlers)
    async def job_gone(type: str | None, body: kopf.Body, **_: Any) -> None:
        observed("job", type)
        if type == "DELETED" or body.metadata.get("deletionTimestamp"):
            jobs.end(dict(body), gone=type == "DELETED")

    @kopf.on.event("v1", "pods", registry=handlers, labels=OURS)
    async def pod(type: str | None, body: kopf.Body, **_: Any) -> None:
        observed("pod", type)
        if type == "DELETED":
            cluster.pod_deleted(body)
        else:
            cluster.pod_changed(body)

    @kopf.on.event("v1", "nodes", registry=handlers)
    async def node(type: str | None, name: str, memo: kopf.Memo, **_: Any) -> None:
        observed("node", type)
        if type == "DELETED":
            cluster.node_deleted(name)
        elif (now := cluster.node(name)) is not memo.get("indexed"):  # not for every heartbeat of the kubelet
            memo.indexed = now
            cluster.node_changed(name)

    def observed(kind: str, change: str | None) -> None:
        shared.counts.watched[kind] += 1
        if change is None:
            jobs.resync.soon()

    return handlers


class HandledGenerations(kopf.DiffBaseStorage):
    """kopf's storage for detecting edits, which holds the generation of each job's spec that was handled last. The API
    server increments the generation with each edit of the spec. The storage is in memory, so kopf writes nothing into a
    job, and after a restart every job counts as created.
    """

    def __init__(self, jobs: JobController) -> None:
        super().__init__()
        self._jobs = jobs

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> Any:
        """Return the value whose changes kopf detects: a job's generation, or {} for other kinds of objects. kopf
        calls this at each event.
        """
        return {"spec": body.metadata.get("generation")} if body.get("kind") == KIND else {}

    def fetch(self, *, body: kopf.Body) -> Any:
        generation = self._jobs.handled_generation(body) if body.get("kind") == KIND else None
        return None if generation is None else {"spec": generation}

    def store(self, *, body: kopf.Body, patch: Any, essence: Any) -> None:
        """Store nothing: the handlers have passed the spec on to the jobs."""


def kopf_settings(jobs: JobController) -> kopf.OperatorSettings:
    """Return kopf's settings: finite timeouts, a watch of workers' pods only, and no writes to the cluster."""
    chosen = kopf.OperatorSettings()
    chosen.watching.label_selectors["v1/pods"] = LABEL_JOB_NAME
    chosen.watching.server_timeout = 300
    chosen.watching.client_timeout = 330
    chosen.watching.connect_timeout = 10
    chosen.networking.request_timeout = 30
    chosen.networking.connect_timeout = 5
    chosen.networking.error_backoffs = (1, 1, 2, 2, 3, *[5] * 720)  # an hour; then the process ends
    chosen.posting.enabled = False
    chosen.scanning.disabled = False
    chosen.persistence.diffbase_storage = HandledGenerations(jobs)
    chosen.persistence.progress_storage = kopf.MultiProgressStorage(())  # kopf retries no handler
    chosen.persistence.finalizer = f"{GROUP}/finalizer"  # none is ever set
    return chosen


class KopfRepetitions(logging.Filter):
    """A log filter that drops kopf's messages about each attempt of a request, and its tracebacks about kinds that the
    API server does not serve (404). The operator logs both problems once, in a sentence.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        tried = record.getMessage().startswith("Request attempt #")
        return not (record.name.startswith("kopf") and (tried or getattr(error, "status", None) == NOT_FOUND))
