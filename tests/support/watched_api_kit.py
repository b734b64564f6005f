"""A small fake API server, and a job controller that uses it."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import ApiError
from bamboo_operator.jobs.controller import JobController
from manifest_kit import minimal
from opsim_kopf import shared_for

KEY = ("default", "test")


EARLY, LATE = "2026-03-01T12:00:00Z", "2026-03-01T12:00:05Z"


class Server:
    """A fake connection to an API server: it accepts requests on pods, events and statuses, and answers others 404."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.status: dict[str, Any] = {}  # the last patch of a job's status
        self.conditions: dict[str, tuple[str, str]] = {}  # the newest of each type: its status and reason

    async def call(
        self, method: str, path: str, body: Any = None, query: Mapping[str, str] | None = None, kind: str = ""
    ) -> dict[str, Any]:
        self.asked.append(f"{method} {path}")
        last = path.rpartition("/")[2]
        if last == "status":
            status = self.status = body["status"]
            self.conditions |= {one["type"]: (one["status"], one["reason"]) for one in status.get("conditions") or ()}
        elif last not in ("pods", "events"):
            raise ApiError(404, "NotFound", path)
        return {}


@asynccontextmanager
async def managed(server: Server) -> AsyncIterator[JobController]:
    jobs = JobController(shared_for(KubeApi(server)))
    try:
        yield jobs
    finally:
        await jobs.stop()


def job_event(jobs: JobController, kind: str | None, job: dict[str, Any]) -> None:
    """Report a job to the controller as edited ("MODIFIED"), gone ("DELETED"), being deleted (by metadata) or new."""
    if kind == "DELETED" or "deletionTimestamp" in job["metadata"]:
        jobs.end(job, gone=kind == "DELETED")
    elif kind == "MODIFIED":
        jobs.edited(job)
    else:
        jobs.begin(job)


def body(uid: str, made: str = EARLY, **spec: Any) -> dict[str, Any]:
    document = minimal()
    metadata = {**document["metadata"], "namespace": KEY[0], "name": KEY[1], "uid": uid, "generation": 1}
    return {**document, "metadata": {**metadata, "creationTimestamp": made}, "spec": {**document["spec"], **spec}}


def uids(jobs: JobController) -> list[str]:
    return [job.uid for job in jobs.running()]
