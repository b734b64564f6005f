"""What kopf watches, and where its events go."""

from typing import Any

import kopf

from bamboo_core.names import GROUP, LABEL_JOB_NAME, PLURAL, VERSION
from bamboo_operator.jobs.controller import JobController
from bamboo_operator.jobs.shared import SharedResources


def watch_handlers(jobs: JobController, shared: SharedResources) -> kopf.OperatorRegistry:
    handlers = kopf.OperatorRegistry()

    @kopf.on.startup(registry=handlers)
    async def startup(**_: Any) -> None:
        jobs.begin()

    def observed(kind: str, change: str | None) -> None:
        shared.counts.watched[kind] += 1
        if change is None:
            jobs.resync.soon()

    @kopf.on.event(GROUP, VERSION, PLURAL, id="job", registry=handlers)
    async def job(event: Any, **_: Any) -> None:
        observed("job", event["type"])
        jobs.job_event(event["type"], event["object"])

    # As indices, because then kopf lists all of them before it passes on the first job

    @kopf.index("v1", "pods", id="pod", registry=handlers, labels={LABEL_JOB_NAME: kopf.PRESENT})
    async def pod(body: Any, **_: Any) -> None:
        shared.cluster.pod_event(None, body)
        jobs.pod_changed(body)

    @kopf.index("v1", "nodes", id="node", registry=handlers)
    async def node(body: Any, **_: Any) -> None:
        shared.cluster.node_event(None, body)

    @kopf.on.event("v1", "pods", id="pod-gone", registry=handlers, labels={LABEL_JOB_NAME: kopf.PRESENT})
    async def pod_gone(event: Any, **_: Any) -> None:
        observed("pod", event["type"])
        if event["type"] == "DELETED":
            shared.cluster.pod_event("DELETED", event["object"])

    @kopf.on.event("v1", "nodes", id="node-gone", registry=handlers)
    async def node_gone(event: Any, **_: Any) -> None:
        observed("node", event["type"])
        if event["type"] == "DELETED":
            shared.cluster.node_event("DELETED", event["object"])

    return handlers


class NoDiffBase(kopf.DiffBaseStorage):
    """No handler here asks what has changed: kopf need not copy every object at each of its events to know it."""

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        return {}

    def fetch(self, *, body: Any) -> None:
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        raise AssertionError("nothing is ever stored")


def kopf_settings() -> kopf.OperatorSettings:
    """Everything finite; only workers' pods are streamed; kopf posts nothing, and keeps nothing."""
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
    chosen.persistence.diffbase_storage = NoDiffBase()
    chosen.persistence.progress_storage = kopf.MultiProgressStorage(())  # no handler is tried again by kopf
    chosen.persistence.finalizer = f"{GROUP}/finalizer"  # none is ever set
    return chosen
