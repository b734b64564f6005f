"""A small played API server, and a job controller on it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from bamboo_core.kube.api import KubeApi
from bamboo_operator.jobs.controller import JobController
from bamboo_operator.jobs.shared import SharedResources
from bamboo_operator.kube.access import ApiCallCounts, connect
from http_kit import serving
from kube_server_kit import access_to
from manifest_kit import minimal
from opsim_kopf import shared_for

KEY = ("default", "test")


EARLY, LATE = "2026-03-01T12:00:00Z", "2026-03-01T12:00:05Z"


class Server:
    """An API server. uids: of the BambooJobs that exist. namespaces: in which pods can be created."""

    def __init__(self) -> None:
        self.uids: dict[tuple[str, str], str] = {}
        self.namespaces = {"default"}
        self.asked: list[str] = []
        self.events: list[tuple[str, str]] = []  # reasons and messages
        self.status: dict[str, Any] = {}  # the last patch of a job's status
        self.conditions: dict[str, tuple[str, str]] = {}  # of the last status: whether each holds, and the reason

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(f"{request.method} {request.path}")
        parts = request.path.split("/")
        namespace = parts[parts.index("namespaces") + 1]
        if parts[-1] == "pods":
            found = namespace in self.namespaces
            return web.json_response(
                {} if found else {"reason": "NotFound", "message": "no such namespace"}, status=201 if found else 404
            )
        if parts[-1] == "events":
            event = await request.json()
            self.events.append((event["reason"], event["message"]))
            return web.json_response({}, status=201)
        if parts[-1] == "status":
            status = self.status = (await request.json())["status"]
            self.conditions |= {one["type"]: (one["status"], one["reason"]) for one in status.get("conditions") or ()}
            return web.json_response({})
        uid = self.uids.get((namespace, parts[-1]))
        return web.json_response(
            {"metadata": {"uid": uid}} if uid else {"reason": "NotFound"}, status=200 if uid else 404
        )


@asynccontextmanager
async def sharing(server: Server) -> AsyncIterator[SharedResources]:
    async with serving(server.answer) as url:
        connection = connect(access_to(url), ApiCallCounts(), 32)
        try:
            yield shared_for(KubeApi(connection))
        finally:
            await connection.close()


@asynccontextmanager
async def managed(server: Server) -> AsyncIterator[JobController]:
    async with sharing(server) as shared:
        jobs = JobController(shared)
        try:
            yield jobs
        finally:
            await jobs.stop()


def job_event(jobs: JobController, kind: str | None, job: dict[str, Any]) -> None:
    """Tell the controller of a job that is new, edited, being deleted or gone."""
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


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def uids(jobs: JobController) -> list[str]:
    return [job.uid for job in jobs.running()]
