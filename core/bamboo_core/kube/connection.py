"""The way to one API server, for the command line and the operator: requests in JSON, logs and WebSockets.

Every request has a time limit, and every answer in JSON a largest size. What the server refuses is an ApiError. What
keeps it from answering is what aiohttp raises: aiohttp.ClientError, OSError or TimeoutError.

By hand, because the official client's generic calls (37.0.2) are aiohttp's as well, in no less CPU time, and leave
sizes, refusals and counts to the caller; its import takes 0.16 s and 31 MiB more (measured at b11a1fe3).
"""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp

from bamboo_core.kube.credentials import Credentials
from bamboo_core.kube.errors import ApiError
from bamboo_core.kube.kubeconfig import Access
from bamboo_core.kube.request_parts import Object

LARGEST_ANSWER = 64 << 20  # bytes of one in JSON; an object has at most about 1.5 MB, and lists come in pages
BUSY_SECONDS, MOST_BUSY_SECONDS = 0.5, 5.0  # a pause if the server names none, and at most
CLOSE_SECONDS = 2.0  # for a WebSocket's last frame
JSON = "application/json"

# verb, path, code ("error" if there was no answer), seconds
Ended = Callable[[str, str, str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """agent: who the server is told that asks. connections: open at the same time, at most.

    tries: of a request, in all, while the server has too much to do (429).
    """

    agent: str
    total_seconds: float
    connect_seconds: float
    connections: int
    tries: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    method: str
    path: str
    query: Mapping[str, str] | None = None
    data: bytes | None = None
    kind: str = JSON


class Connection:
    """May be used by many tasks at once. ended: told of every request; a session is made with the first one.

    Every method may also raise what goes wrong with the credentials: a ConfigError or a ClusterUnreachable.
    """

    def __init__(self, access: Access, options: ConnectionOptions, ended: Ended | None = None) -> None:
        self.access = access
        self._options, self._ended = options, ended
        self._credentials = Credentials(access)
        self._session: aiohttp.ClientSession | None = None
        self._certificate: str | None = None  # of a plugin, that the session shows
        self._left: list[aiohttp.ClientSession] = []

    async def open(self) -> None:
        """Nothing is asked yet, but what is wrong with credentials and certificates is raised here."""
        await self._ready()

    async def close(self) -> None:
        for session in [*self._left, *([self._session] if self._session else [])]:
            await session.close()

    async def call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        kind: str = JSON,
    ) -> Object:
        """What the server answers, if that is an object, else {}. kind: of the body."""
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()  # compact, as Go writes JSON
        request = _Request(method=method, path=path, query=query, data=data, kind=kind)
        for left in reversed(range(self._options.tries)):
            async with self._answer(request) as answer:
                found = await _object(answer)
            if answer.status < 400:
                return found
            if answer.status != 429 or not left:
                raise _refusal(answer, found)
            await asyncio.sleep(_retry_after(answer))
        raise AssertionError("unreachable")

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, query: Mapping[str, str], silence_seconds: float
    ) -> AsyncIterator[aiohttp.StreamReader]:
        """What comes, for as long as it comes. silence_seconds: in which nothing does, at most."""
        connect = self._options.connect_seconds
        limits = aiohttp.ClientTimeout(total=None, connect=connect, sock_read=silence_seconds)
        async with self._answer(_Request(method="GET", path=path, query=query), limits) as answer:
            if answer.status >= 400:
                raise _refusal(answer, await _object(answer))
            yield answer.content

    @contextlib.asynccontextmanager
    async def socket(
        self, path: str, query: Mapping[str, str], protocol: str
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A WebSocket through the API server."""
        await self._ready()
        assert self._session is not None
        try:
            async with self._session.ws_connect(
                self._url(path),
                params=query,
                protocols=[protocol],
                headers=self._headers(),
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS),
                max_msg_size=0,
                **self._route(),
            ) as socket:
                yield socket
        except aiohttp.WSServerHandshakeError as error:
            raise ApiError(error.status, "", f"the API server refuses {path}: {error.status} {error.message}") from None

    @contextlib.asynccontextmanager
    async def _answer(
        self, request: _Request, limits: aiohttp.ClientTimeout | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Once more with new credentials if a plugin's are refused."""
        await self._ready()
        options: dict[str, Any] = {"timeout": limits, **self._route()} if limits else self._route()
        for last in (False, True):
            assert self._session is not None
            headers = self._headers(request.kind if request.data is not None else None)
            begun, code = time.monotonic(), "error"
            try:
                async with self._session.request(
                    request.method,
                    self._url(request.path),
                    params=request.query,
                    data=request.data,
                    headers=headers,
                    **options,
                ) as answer:
                    if answer.status == 401 and not last and await self._ready(refused=True):
                        code = "401"
                        continue
                    yield answer
                    code = str(answer.status)
                    return
            finally:
                if self._ended:
                    self._ended(request.method, request.path, code, time.monotonic() - begun)

    async def _ready(self, *, refused: bool = False) -> bool:
        """Credentials that are fresh, and a session that shows the newest certificate. True: a plugin was run."""
        renewed = await self._credentials.renew(refused=refused)
        if self._session is None or self._credentials.certificate != self._certificate:
            if self._session is not None:
                self._left.append(self._session)  # not closed, a log may be streamed over it
            self._session, self._certificate = self._new_session(), self._credentials.certificate
        return renewed

    def _new_session(self) -> aiohttp.ClientSession:
        chosen = self._options
        limits = aiohttp.ClientTimeout(total=chosen.total_seconds, connect=chosen.connect_seconds)
        connector = aiohttp.TCPConnector(ssl=self._credentials.tls(), limit=chosen.connections)
        return aiohttp.ClientSession(connector=connector, timeout=limits)

    def _headers(self, kind: str | None = None) -> list[tuple[str, str]]:
        headers = [("Accept", JSON), ("User-Agent", self._options.agent), *self._credentials.headers()]
        return [*headers, ("Content-Type", kind)] if kind else headers

    def _route(self) -> dict[str, Any]:
        server = self.access.server
        return {"proxy": server.proxy, "server_hostname": server.tls_name}

    def _url(self, path: str) -> str:
        return self.access.server.url + quote(path)


async def _object(answer: aiohttp.ClientResponse) -> Object:
    """Proxies, and an API server with too much to do, refuse in plain text."""
    data = bytearray()
    async for chunk in answer.content.iter_any():
        data += chunk
        if len(data) > LARGEST_ANSWER:
            raise ApiError(answer.status, "TooLarge", f"an answer of more than {LARGEST_ANSWER >> 20} MiB")
    try:
        found = json.loads(data) if data else {}
    except (ValueError, RecursionError):
        if answer.status < 400:
            raise ApiError(answer.status, "NotJson", "an answer that is not JSON") from None
        return {}
    return found if isinstance(found, dict) else {}


def _refusal(answer: aiohttp.ClientResponse, found: Object) -> ApiError:
    reason = str(found.get("reason") or answer.reason or "")
    return ApiError(answer.status, reason, str(found.get("message") or ""))


def _retry_after(answer: aiohttp.ClientResponse) -> float:
    """In how many seconds the server wants to be asked again; an HTTP date, which is allowed, too, names none."""
    named = answer.headers.get("Retry-After", "")
    return min(float(named), MOST_BUSY_SECONDS) if re.fullmatch(r"\d{1,9}", named) else BUSY_SECONDS
