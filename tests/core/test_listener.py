"""Callers who have not proved who they are: how many connections they get, for how long, and that others come in."""

import asyncio
import base64
import contextlib
import json
import logging
import os
import resource
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from bamboo_core.control.channel_events import ChannelEvent, Received
from bamboo_core.control.protocol import Stop
from bamboo_core.control.server import Channels
from bamboo_core.kube.kubeconfig import Access, ClusterServer, User
from bamboo_core.serving.descriptors import DescriptorShares, raise_limit
from bamboo_core.serving.listener import BoundedListener, ConnectionBounds
from bamboo_operator.auth.pod_tokens import TokenReviewer, pod_authenticator
from bamboo_operator.auth.serving_certificate import ServingCertificate
from bamboo_operator.auth.worker_gateway import WorkerGateway, workers_path
from bamboo_operator.http.server import WebServer
from bamboo_operator.kube.api_calls import ApiCallCounts
from bamboo_operator.kube.client import ApiClient, connect
from certificates import issue, trusting
from folders import TASK_PATH
from http_kit import serving

JOB = ("team", "job")
OWN = 64  # descriptors that this process needs itself


async def _operate(server: str, folder: Path) -> None:
    shares = DescriptorShares.of(raise_limit(), OWN)
    access = Access(context="test", server=ClusterServer(url=server), user=User())
    api = ApiClient(connect(access, ApiCallCounts(), 4))
    gateway, web = (
        WorkerGateway(),
        WebServer(lambda: None, lambda: None, CollectorRegistry(), ConnectionBounds(unauthenticated=shares.visitors)),
    )

    def heard(event: ChannelEvent) -> None:
        if isinstance(event, Received):
            channels.send(event.worker, Stop(reason="Heard"))

    channels = Channels(heard, pod_authenticator(JOB, TokenReviewer(api), lambda worker: f"uid-of-{worker}"))
    gateway.open(JOB, channels)
    certificate = ServingCertificate(chain=folder / "tls.crt", key=folder / "tls.key", authority=folder / "ca.crt")
    bounds = ConnectionBounds(unauthenticated=shares.unauthenticated, known=shares.workers)
    print(
        await gateway.start("127.0.0.1", 0, certificate.context(), bounds), await web.start("127.0.0.1", 0), flush=True
    )
    while True:  # until it is killed
        await api.uid_of("/api/v1/namespaces/team/pods/any")
        await asyncio.sleep(0.02)


def flooded_operator(server: str, folder: str) -> None:
    """The operator's two ports and its calls to the API server, in a process with few file descriptors.

    server: the API server's URL. folder: with the certificate. Prints the two ports. A worker that is heard gets an
    answer; a call to the API server that fails ends the process.
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW // 2, FEW))
    asyncio.run(_operate(server, Path(folder)))


PATIENCE = 60.0


class Port:
    """A listener whose application answers at / and holds callers at /wait until they are let go."""

    def __init__(self, bounds: ConnectionBounds) -> None:
        app = web.Application()
        self.refused: list[str] = []
        self.listener = BoundedListener(app, bounds, self.refused.append)
        self.go, self.waiting = asyncio.Event(), 0
        app.router.add_get("/", self._answer)
        app.router.add_get("/wait", self._wait)
        self.number = 0

    async def _answer(self, request: web.Request) -> web.Response:
        return web.Response(text="here")

    async def _wait(self, request: web.Request) -> web.Response:
        self.waiting += 1
        await self.go.wait()
        return web.Response(text="gone")

    async def connect(self, tls: ssl.SSLContext | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.number, ssl=tls)


@contextlib.asynccontextmanager
async def port(tls: ssl.SSLContext | None = None, **bounds: Any) -> AsyncIterator[Port]:
    made = Port(ConnectionBounds(**{"unauthenticated": 4, "request": PATIENCE, "idle": PATIENCE, **bounds}))
    made.number = await made.listener.start("127.0.0.1", 0, tls)
    try:
        yield made
    finally:
        made.go.set()
        await made.listener.stop()


async def until(done: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not done():
            await asyncio.sleep(0.01)


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What comes until the connection is closed."""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE):
            return await reader.read()
    return b""


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: a"])
async def test_a_request_that_does_not_come_or_does_not_end_is_not_waited_for(said: bytes) -> None:
    async with port(request=0.3) as place:
        reader, writer = await place.connect()
        writer.write(said)
        assert await ended(reader) == b""
        writer.close()
        await until(lambda: place.listener.unauthenticated == 0)
        assert place.refused == ["TooSlow"]


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + 9000 * b"a" + b"\r\n\r\n", b"\x16\x03\x01\r\n\r\n"]
)
async def test_a_request_that_cannot_be_read_is_answered_and_fills_no_log(
    said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with port() as place:
        for _ in range(5):
            reader, writer = await place.connect()
            writer.write(2 * said)
            assert (await ended(reader)).startswith(b"HTTP/1.0 400 Bad Request")
            writer.close()
        await until(lambda: place.listener.unauthenticated == 0)
    assert "Traceback" not in caplog.text
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) <= 1, caplog.text


async def test_a_handshake_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    issue(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    async with port(tls, request=0.5) as place:
        reader, writer = await place.connect()
        assert await ended(reader) == b""
        writer.close()
        await until(lambda: place.listener.unauthenticated == 0)
        assert place.refused == ["TooSlow"]
    async with port(tls) as place, aiohttp.ClientSession() as session:
        url = f"https://127.0.0.1:{place.number}/"
        async with session.get(url, ssl=trusting(tmp_path)) as answer:
            assert await answer.text() == "here"


async def test_an_answer_that_is_not_followed_by_another_request_is_the_last() -> None:
    async with port(idle=0.3) as place:
        reader, writer = await place.connect()
        writer.write(3 * b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")  # at once, so that none can come too late
        assert (await ended(reader)).count(b"HTTP/1.1 200") == 3
        writer.close()
        assert place.refused == [], "that is how connections usually end"


async def test_half_open_connections_give_way_and_those_that_are_served_do_not() -> None:
    async with port() as place, contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        served = asyncio.create_task(_get(session, place, "/wait"))
        await until(lambda: place.waiting == 1)
        ends = [await place.connect() for _ in range(20)]
        for _, writer in ends:
            stack.callback(writer.close)
        await until(lambda: place.refused.count("TooManyCallers") == 17)
        assert place.listener.unauthenticated == 4
        assert await _get(session, place, "/") == "here"
        place.go.set()
        assert await served == "gone"


async def test_connections_that_break_in_the_middle_of_a_handshake_leave_nothing(tmp_path: Path) -> None:
    issue(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    async with port(tls) as place:
        for said in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"):
            _, writer = await place.connect()
            writer.write(said)
            await until(lambda: place.listener.unauthenticated)
            writer.close()
            await until(lambda: place.listener.unauthenticated == 0)


async def test_stopping_closes_what_stands_and_may_come_twice_or_without_a_start() -> None:
    async with port() as place:
        reader, writer = await place.connect()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"here")
        await place.listener.stop()
        assert await ended(reader) == b""
        writer.close()
        with pytest.raises(OSError, match=r"[Cc]onnect"):
            await place.connect()
    await BoundedListener(web.Application(), ConnectionBounds(unauthenticated=1)).stop()


async def _get(session: aiohttp.ClientSession, place: Port, what: str) -> str:
    async with session.get(f"http://127.0.0.1:{place.number}{what}") as answer:
        return await answer.text()


FEW, HALF_OPEN = 256, 1000


def token(worker: str) -> str:
    """As a pod's looks, but signed by nobody."""
    claims = {"kubernetes.io": {"namespace": JOB[0], "pod": {"name": worker, "uid": f"uid-of-{worker}"}}}
    return ".".join(base64.urlsafe_b64encode(json.dumps(p).encode()).decode().rstrip("=") for p in ({}, claims, {}))


class ApiServer:
    """Vouches for every token, and says that every pod is there."""

    def __init__(self) -> None:
        self.reads = 0

    async def review(self, request: web.Request) -> web.Response:
        claims = (await request.json())["spec"]["token"].split(".")[1]
        pod = json.loads(base64.urlsafe_b64decode(claims + "=="))["kubernetes.io"]["pod"]
        extra = {f"authentication.kubernetes.io/pod-{key}": [value] for key, value in pod.items()}
        user = {"username": f"system:serviceaccount:{JOB[0]}:default", "extra": extra}
        status = {"authenticated": True, "audiences": ["bamboo.dev"], "user": user}
        return web.json_response({"status": status})

    async def read(self, _: web.Request) -> web.Response:
        self.reads += 1
        return web.json_response({"metadata": {"uid": "u"}})


@contextlib.asynccontextmanager
async def api_server() -> AsyncIterator[tuple[ApiServer, str]]:
    server, app = ApiServer(), web.Application()
    app.router.add_post("/apis/authentication.k8s.io/v1/tokenreviews", server.review)
    app.router.add_get("/api/{rest:.*}", server.read)
    async with serving(app) as url:
        yield server, url


@contextlib.contextmanager
def operator(server: str, folder: Path) -> Iterator["subprocess.Popen[str]"]:
    program = "import sys, test_listener; test_listener.flooded_operator(*sys.argv[1:])"
    command = [sys.executable, "-c", program, server, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": TASK_PATH})
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_a_thousand_half_open_connections_take_nothing_from_workers_nor_from_the_operator(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = min(HALF_OPEN, raise_limit() - 100)
    assert many > 2 * FEW
    issue(tmp_path)
    tls = trusting(tmp_path)
    async with api_server() as (server, url), aiohttp.ClientSession() as session:
        with operator(url, tmp_path) as process, contextlib.ExitStack() as half_open:
            assert process.stdout is not None
            line = await asyncio.to_thread(process.stdout.readline)
            workers, health = (int(number) for number in line.split())

            async def come(name: str) -> aiohttp.ClientWebSocketResponse:
                headers = {"Authorization": f"Bearer {token(name)}"}
                socket = await session.ws_connect(
                    f"wss://127.0.0.1:{workers}{workers_path(JOB)}", headers=headers, ssl=tls
                )
                await socket.send_str(json.dumps({"type": "Hello", "worker": name, "host": "10.0.0.1", "port": 1}))
                return socket

            async def heard(socket: aiohttp.ClientWebSocketResponse) -> None:
                await socket.send_str('{"type":"WorkerReady"}')
                assert "Heard" in (await socket.receive(timeout=PATIENCE)).data

            first = await come("job-w0")
            await heard(first)
            for number in range(many):
                where = health if number % 3 == 0 else workers
                half_open.enter_context(socket.create_connection(("127.0.0.1", where), timeout=PATIENCE))
            await heard(first)
            await heard(await come("job-w1"))
            async with session.get(f"http://127.0.0.1:{health}/healthz") as answer:
                assert answer.status == 200
            reads = server.reads
            await until(lambda: server.reads > reads + 10)
            assert process.poll() is None
            used = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
            shares = DescriptorShares.of(FEW, OWN)
            assert used <= shares.unauthenticated + shares.visitors + OWN
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
