"""A kubelet for all fake nodes. Instead of starting processes, it plays the worker of each BambooJob pod.

Like a real kubelet it requests a token for each pod (TokenRequest, bound to the pod), writes the pod's status and
address, and removes the pod from the API.
"""

import asyncio
import logging
import ssl
import time
from collections import Counter
from functools import cache
from typing import Any

import aiohttp

from _plane import STRATEGIC, Api, ApiError, Json
from _standin import Play, Standin
from bamboo_core.names import (
    ENV_CA,
    ENV_COORDINATOR,
    ENV_WORKER,
    LABEL_JOB_NAME,
    TOKEN_AUDIENCE,
    TOKEN_SECONDS,
    TRAINER_CONTAINER,
)

logger = logging.getLogger(__name__)

LAG_SECONDS = 0.05


class Fleet:
    """The kubelet and all stand-in workers. plays: jobs by name. late: the event loop's longest delay, in seconds."""

    def __init__(self, api: Api, plays: dict[str, Play]) -> None:
        self._api, self.plays = api, plays
        self.late = 0.0
        self.created = 0
        self._pods: dict[str, asyncio.Task[None]] = {}  # by uid
        self._nodes: dict[str, str] = {}
        self._removing: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession

    def alone(self, worker: Standin) -> bool:
        """Return whether no other worker is on this worker's node."""
        return Counter(self._nodes.values())[worker.node] == 1

    async def run(self) -> None:
        """Follow the pods, run their workers and commit the jobs' steps, forever."""
        tasks = [asyncio.create_task(play.train()) for play in self.plays.values()]
        tasks.append(asyncio.create_task(self._measure_lag()))
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector)
        try:
            query = {"labelSelector": LABEL_JOB_NAME, "fieldSelector": "spec.nodeName!="}
            async for kind, pods in self._api.watch("/api/v1/pods", **query):
                for pod in pods:
                    self._sync(kind, pod)
        finally:
            tasks += [*self._pods.values(), *self._removing]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._session.close()

    async def _measure_lag(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(LAG_SECONDS)
            self.late = max(self.late, time.monotonic() - before - LAG_SECONDS)

    def _sync(self, kind: str, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        known = self._pods.get(uid)
        if kind == "DELETED" or "deletionTimestamp" in pod["metadata"]:
            if known is not None:
                known.cancel()
                del self._pods[uid]
                self._nodes.pop(uid, None)
            if kind != "DELETED":
                task = asyncio.create_task(self._remove(pod))
                self._removing.add(task)
                task.add_done_callback(self._removing.discard)
        elif known is None and pod["status"].get("phase") == "Pending":
            self.created += 1
            self._nodes[uid] = pod["spec"]["nodeName"]
            address = f"10.{self.created // 250}.{self.created % 250}.2"
            task = self._pods[uid] = asyncio.create_task(self._live(pod, address))
            task.add_done_callback(_told)

    async def _live(self, pod: Json, address: str) -> None:
        data = pod["metadata"]
        token = await self._token(pod)
        await self._write(pod, "Running", {"running": {"startedAt": _now()}}, address)
        env = {item["name"]: item.get("value") for item in pod["spec"]["containers"][0]["env"]}
        play = self.plays[data["labels"][LABEL_JOB_NAME]]
        trusting = _trusting(env[ENV_CA] or "")
        worker = Standin(play, env[ENV_WORKER], pod["spec"]["nodeName"], address, env[ENV_COORDINATOR], trusting)
        try:
            await worker.run(self._session, lambda: token)
        finally:
            play.workers.pop(worker.name, None)
        self._nodes.pop(data["uid"], None)
        ended = {"exitCode": 0, "reason": "Completed", "finishedAt": _now()}
        await self._write(pod, "Succeeded", {"$patch": "replace", "terminated": ended}, address)

    async def _token(self, pod: Json) -> str:
        data = pod["metadata"]
        bound = {"apiVersion": "v1", "kind": "Pod", "name": data["name"], "uid": data["uid"]}
        spec = {"audiences": [TOKEN_AUDIENCE], "expirationSeconds": TOKEN_SECONDS, "boundObjectRef": bound}
        account = f"/api/v1/namespaces/{data['namespace']}/serviceaccounts/{pod['spec']['serviceAccountName']}"
        answer = await self._api.request("POST", f"{account}/token", {"spec": spec})
        token: str = answer["status"]["token"]
        return token

    async def _write(self, pod: Json, phase: str, state: Json, address: str) -> None:
        """Write the pod's status. state: the container's state. A later state needs `$patch: replace` to replace the
        earlier one; the API server would drop a first state that has it.
        """
        running = str(phase == "Running")
        container = {
            "name": TRAINER_CONTAINER,
            "image": "none",
            "imageID": "none",
            "ready": phase == "Running",
            "restartCount": 0,
            "state": state,
        }
        status: dict[str, Any] = {
            "phase": phase,
            "podIP": address,
            "podIPs": [{"ip": address}],
            "containerStatuses": [container],
            "conditions": [{"type": kind, "status": running} for kind in ("Initialized", "Ready", "ContainersReady")],
        }
        await self._api.request("PATCH", f"{_path(pod)}/status", {"status": status}, content=STRATEGIC)

    async def _remove(self, pod: Json) -> None:
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        try:
            await self._api.request("DELETE", _path(pod), body)
        except ApiError as error:
            if error.code not in (404, 409):
                raise


def _path(pod: Json) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@cache
def _trusting(authority: str) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=authority)


def _told(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()):
        if isinstance(error, ApiError) and error.code in (404, 409):
            return  # the pod is gone
        logger.error("a stand-in failed", exc_info=error)
