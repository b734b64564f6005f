"""A worker gateway, and workers that call it."""

import asyncio
import base64
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp

from bamboo_core.control.client import Control
from bamboo_core.control.protocol import ChannelEvent, Heartbeat, Hello, Message, Stop, WorkerJoined
from bamboo_core.control.server import REFUSED_HEADER, Channels
from bamboo_operator.auth.pod_tokens import (
    PodIdentity,
    TokenReviewer,
    pod_authenticator,
)
from bamboo_operator.auth.worker_gateway import WorkerGateway, workers_path
from bamboo_operator.cluster.indices import ClusterIndices
from bamboo_operator.jobs.shared import SharedResources
from opsim_kopf import shared_for
from waiting import in_time

JOB = ("team", "job")


def token(pod: str = "job-w0", uid: str = "u0", namespace: str = "team", salt: str = "") -> str:
    """Return a JWT with a pod's ServiceAccount claims and a made-up signature. salt: text that makes tokens differ."""
    claims = {"aud": ["bamboo.dev"], "kubernetes.io": {"namespace": namespace, "pod": {"name": pod, "uid": uid}}}
    return ".".join(_part(part) for part in ({"alg": "RS256", "salt": salt}, claims, {}))


def _part(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


class ApiServer:
    """A fake API server that accepts the tokens in `good`. asked: number of reviews. most: the most at one time."""

    def __init__(self) -> None:
        self.good: dict[str, PodIdentity] = {}
        self.jobs: list[dict[str, Any]] = []  # metadata of all jobs
        self.asked, self.at_once, self.most = 0, 0, 0
        self.seconds = 0.0

    async def listed(self, path: str, query: dict[str, str]) -> list[dict[str, Any]]:
        return [{"metadata": metadata} for metadata in self.jobs]

    async def review_token(self, token: str, audiences: Sequence[str]) -> dict[str, Any]:
        self.asked += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.at_once -= 1
        who = self.good.get(token)
        if who is None:
            return {"authenticated": False}
        extra = {"authentication.kubernetes.io/pod-name": [who.pod], "authentication.kubernetes.io/pod-uid": [who.uid]}
        user = {"username": f"system:serviceaccount:{who.namespace}:default", "extra": extra}
        return {"authenticated": True, "audiences": list(audiences), "user": user}


class House:
    """A gateway with one job, whose pods are job-w0 (alive, UID u0) and job-w1 (lost)."""

    def __init__(self) -> None:
        self.server, self.gateway, self.events = ApiServer(), WorkerGateway(), list[ChannelEvent]()
        uids = {"job-w0": "u0", "job-w1": ""}
        check = pod_authenticator(JOB, TokenReviewer(self.server), uids.get)
        self.channels = Channels(self.events.append, check)
        self.url = ""

    def shared(self, cluster: ClusterIndices) -> SharedResources:
        """Return the resources of an operator with this gateway and API server."""
        return shared_for(self.server, cluster=cluster, gateway=self.gateway)  # type: ignore[arg-type]

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def knock(self, header: str | None, place: str = workers_path(JOB)) -> tuple[int, str | None]:
        """Try to connect; return (HTTP status, reason for the refusal), or (101, None) if a WebSocket was opened."""
        headers = {} if header is None else {"Authorization": header}
        async with aiohttp.ClientSession() as session:
            try:
                async with session.ws_connect(self.url + place, headers=headers):
                    return 101, None
            except aiohttp.WSServerHandshakeError as error:
                return error.status, error.headers.get(REFUSED_HEADER) if error.headers else None

    @contextlib.asynccontextmanager
    async def greeted(self, name: str = "job-w0") -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Connect with a valid token of job-w0, send a Hello of the worker `name`, and yield the WebSocket."""
        self.server.good[token()] = PodIdentity("team", "job-w0", "u0")
        headers = {"Authorization": f"Bearer {token()}"}
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(self.url + workers_path(JOB), headers=headers) as socket,
        ):
            await socket.send_str(f'{{"type":"Hello","worker":"{name}","host":"h","port":1}}')
            yield socket


@contextlib.asynccontextmanager
async def house(tls: ssl.SSLContext | None = None) -> AsyncIterator[House]:
    place = House()
    port = await place.gateway.start("127.0.0.1", 0, tls)
    place.url = f"{'wss' if tls else 'ws'}://127.0.0.1:{port}"
    place.gateway.open(JOB, place.channels)
    try:
        yield place
    finally:
        await place.gateway.stop()


def beat() -> Heartbeat:
    return Heartbeat(step=1)


async def talk(place: House, said: str, authority: str = "") -> list[Message]:
    """Connect a worker's real client with token `said`; if it joins, send it Stop. Return the messages it received."""
    heard: list[Message] = []
    hello = Hello(worker="job-w0", host="h", port=1)
    control = Control(place.url + workers_path(JOB), lambda: said, lambda: hello, beat, heard.append, authority)
    control.start()
    try:
        await in_time(lambda: heard or place.of(WorkerJoined))
        if place.of(WorkerJoined):
            place.channels.send("job-w0", Stop(reason="Test"))
            await in_time(lambda: heard)
    finally:
        await asyncio.to_thread(control.close, 0.2)
    return heard
