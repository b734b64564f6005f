"""`page`: the job's page in a browser, through a tunnel to the operator, with a token that shows who looks."""

import asyncio
import contextlib
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import aiohttp

from bamboo.kube.api import KubeApi, Object
from bamboo.kube.errors import ApiError, RemoteError
from bamboo.names import PAGE_AUDIENCE, WEB_PORT
from bamboo.remote.browser import show
from bamboo.remote.objects import job_of
from bamboo.remote.session import Session, Target, printable

OPERATOR = "app.kubernetes.io/name=bamboo-operator"
PORT_NAME = "web"
PROTOCOL = "v4.channel.k8s.io"  # what the kubelet speaks to a port that is forwarded over a WebSocket
DATA, ERROR = 0, 1  # its channels
CHUNK = 64 << 10
TOKEN_SECONDS = 3600
LIFE = 0.8  # of a token, after which there is a new one
WARNING = (
    "the token in this URL is {account}'s: for an hour, whoever has it can look at every job that this account may"
    " get, from this machine and from inside the cluster; Ctrl-C ends the tunnel"
)


async def page(
    session: Session, name: Target, *, operator_namespace: str | None, account: str, port: int, open_browser: bool
) -> int:
    """Serves until it is interrupted; the URL is printed, and again whenever the token in it is renewed."""
    job = job_of(await session.api.job(*session.of(name)))
    pod = await _operator(session.api, operator_namespace, job.namespace)
    namespace = operator_namespace or pod["metadata"]["namespace"]
    tunnel = PortForward(session.api, pod["metadata"]["namespace"], pod["metadata"]["name"], web_port(pod))
    outer = await tunnel.open(port)
    opening: asyncio.Task[None] | None = None
    try:
        while True:
            token, seconds = await _token(session.api, namespace, account)
            url = f"http://127.0.0.1:{outer}/jobs/{job.namespace}/{job.name}/#token={token}"
            print(url, flush=True)
            session.say(WARNING.format(account=f"{namespace}/{account}"))
            if open_browser and opening is None:
                opening = asyncio.create_task(_open(session, url))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds * LIFE):
                    await tunnel.broken()
                    raise RemoteError("the tunnel to the operator is broken; has it been restarted?")
    finally:
        if opening is not None:
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await opening
        await tunnel.close()


async def _open(session: Session, url: str) -> None:
    try:
        shown = await show(url)
    except OSError as error:
        session.say(f"the browser was not opened: {error.strerror}; the URL above can be pasted into it")
        return
    if not shown:
        session.say("no browser was found; the URL above can be pasted into one")


async def _operator(api: KubeApi, namespace: str | None, watching: str) -> Object:
    """The running pod of the operator, in that namespace if one is given, that looks after the other one's jobs."""
    place = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
    try:
        pods = await api.listed(place, {"labelSelector": OPERATOR})
    except ApiError as error:
        if error.status != 403 or namespace:
            raise
        raise RemoteError(f"{error}; --operator-namespace says where the operator is") from None
    running = [pod for pod in pods if _is_running(pod)]
    if not running:
        where = f"in namespace {namespace}" if namespace else "in the cluster"
        raise RemoteError(f"no running bamboo-operator was found {where} (label {OPERATOR})")
    found = operator_for(running, watching)
    if found is None and not namespace:
        places = ", ".join(sorted({pod["metadata"]["namespace"] for pod in running}))
        raise RemoteError(
            f"several operators are running (in {places}), and it is not clear which one manages namespace"
            f" {watching}; --operator-namespace names it"
        )
    return found or running[0]


def operator_for(pods: Sequence[Object], namespace: str) -> Object | None:
    """The one that was told to watch that namespace, else the one that watches all; None if several do, or none does.
    A single one is it in any case: how it was told may be another way than by its arguments."""
    if len(pods) == 1:
        return pods[0]
    told = [(pod, watched(pod)) for pod in pods]
    by_name = [pod for pod, names in told if namespace in names]
    found = by_name or [pod for pod, names in told if not names]
    return found[0] if len(found) == 1 else None


def watched(pod: Mapping[str, Any]) -> set[str]:
    """The namespaces that an operator's pod was told to watch; none if all."""
    names = set()
    for container in pod["spec"]["containers"]:
        words = [*(container.get("command") or ()), *(container.get("args") or ())]
        names |= {word.partition("=")[2] for word in words if word.startswith("--namespace=")}
        names |= {name for word, name in pairwise(words) if word == "--namespace"}
    return names


def _is_running(pod: Mapping[str, Any]) -> bool:
    return pod.get("status", {}).get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")


def web_port(pod: Mapping[str, Any]) -> int:
    """The container's port of that name; the usual one if none has it."""
    ports = [port for container in pod["spec"]["containers"] for port in container.get("ports") or ()]
    return next((int(port["containerPort"]) for port in ports if port.get("name") == PORT_NAME), WEB_PORT)


async def _token(api: KubeApi, namespace: str, account: str) -> tuple[str, float]:
    """A token that is good for the job pages and for nothing else, and the seconds of its life."""
    try:
        status = await api.token(namespace, account, PAGE_AUDIENCE, TOKEN_SECONDS)
    except ApiError as error:
        if error.status == 404:
            raise RemoteError(
                f"there is no ServiceAccount {account} in namespace {namespace}; --service-account names another one"
            ) from None
        raise
    return str(status["token"]), float(TOKEN_SECONDS)


class PortForward:
    """A port of this machine, loopback only, that leads to a pod's. One WebSocket for each connection."""

    def __init__(self, api: KubeApi, namespace: str, pod: str, port: int) -> None:
        self._api, self._path, self._port = api, f"/api/v1/namespaces/{namespace}/pods/{pod}/portforward", port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._broken = asyncio.Event()

    async def open(self, port: int = 0) -> int:
        """Listens; returns the port. Tries the way once, so that what is wrong with it is said at once."""
        async with self._api.socket(self._path, {"ports": str(self._port)}, PROTOCOL):
            pass
        try:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        except OSError as error:
            raise RemoteError(f"--port {port}: {error.strerror}") from None
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def broken(self) -> None:
        """Until the pod cannot be reached any more."""
        await self._broken.wait()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async with self._api.socket(self._path, {"ports": str(self._port)}, PROTOCOL) as socket:
                await _join(reader, writer, socket, self._port)
        except ApiError as error:
            if error.status == 404:
                self._broken.set()
        except (RemoteError, ConnectionError, aiohttp.ClientError):
            pass  # this connection only: the browser tries again by itself
        except asyncio.CancelledError:
            pass  # it ends here in any case, and asyncio would print a traceback for a handler that was cancelled
        finally:
            self._connections.discard(task)
            writer.close()


async def _join(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, socket: aiohttp.ClientWebSocketResponse, port: int
) -> None:
    """Until either side ends."""

    async def up() -> None:
        while data := await reader.read(CHUNK):
            await socket.send_bytes(bytes([DATA]) + data)

    async def down() -> None:
        greeted: set[int] = set()  # each channel begins with the port's number
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel not in greeted:
                greeted.add(channel)
                data = data[2:] if data[:2] == struct.pack("<H", port) else data
            if channel == ERROR and data:
                raise RemoteError(f"the pod refuses the connection: {printable(data.decode(errors='replace'))}")
            if channel == DATA and data:
                writer.write(data)
                await writer.drain()

    ways = [asyncio.create_task(up()), asyncio.create_task(down())]
    try:
        done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in done:
            way.result()  # raises what ended it
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
