"""A listener for an aiohttp application whose connections callers cannot exhaust.

aiohttp's own sites accept every connection, wait a minute for a TLS handshake, and longer for a request. Here both have
to arrive within seconds, idle connections are closed, and unauthenticated callers get only a share of the connections.
If that share is used up, the listener closes the oldest idle connection of the network with the most idle connections.
So neither idle or half-open connections nor one caller with many connections can keep other callers out.
"""

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from bamboo_core.complaints import system_reason

K = TypeVar("K")


def network_of(host: str) -> str:
    """Return the network that identifies a caller: its IPv4 address, or the /64 network of its IPv6 address, as one
    host may use every address in that network. A host that is no address is returned unchanged.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


@dataclass(slots=True)
class _Caller:
    network: str
    busy: bool = False


class UnauthenticatedConnections(Generic[K]):
    """The connections of unauthenticated callers, oldest first. room: their largest number."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._unauthenticated: dict[K, _Caller] = {}
        self._idle: Counter[str] = Counter()  # by network

    def __len__(self) -> int:
        return len(self._unauthenticated)

    def __contains__(self, key: K) -> bool:
        return key in self._unauthenticated

    def admit(self, key: K, host: str) -> K | None:
        """Add a caller. Return the connection to close for it; None if there is room. If all others are being served
        and leave no room, do not add the caller, and return its own connection.
        """
        leaving = self.evict() if len(self._unauthenticated) >= self._room else None
        if len(self._unauthenticated) >= self._room:
            return key  # all others are being served
        caller = self._unauthenticated[key] = _Caller(network_of(host))
        self._idle[caller.network] += 1
        return leaving

    def evict(self) -> K | None:
        """Remove and return the oldest connection that is not being served, of the network with the most such
        connections; None if there is none.
        """
        if not self._idle:
            return None
        crowded = max(self._idle, key=self._idle.__getitem__)
        most = self._idle[crowded]
        oldest = next(k for k, g in self._unauthenticated.items() if not g.busy and self._idle[g.network] == most)
        self.remove(oldest)
        return oldest

    def mark(self, key: K, *, busy: bool) -> None:
        """Record whether the caller's request is in progress (`busy`) or answered."""
        caller = self._unauthenticated.get(key)
        if caller is not None and caller.busy != busy:
            caller.busy = busy
            self._count(caller.network, -1 if busy else 1)

    def remove(self, key: K) -> None:
        """Remove a caller that has gone or is authenticated."""
        caller = self._unauthenticated.pop(key, None)
        if caller is not None and not caller.busy:
            self._count(caller.network, -1)

    def _count(self, network: str, change: int) -> None:
        self._idle[network] += change
        if not self._idle[network]:
            del self._idle[network]


logger = logging.getLogger(__name__)

REQUEST_SECONDS = 10.0  # for the TLS handshake and a request's headers, together
IDLE_SECONDS = 75.0  # for reading a response, and until the next request
SHUTDOWN_SECONDS = 2.0  # of TLS
REQUESTS_END_SECONDS = 1.0  # for requests in progress when the listener stops
BACKLOG = 1024
PAUSE_SECONDS = 0.1  # after the system refused a connection
QUIET_SECONDS = 60.0  # between two warnings of the same kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBounds:
    """The limits of a listener.

    unauthenticated: the most connections of unauthenticated callers. known: of authenticated ones; the listener only
    reports when it is reached (`BoundedListener.full`). request: seconds for the TLS handshake and a request's headers,
    together. idle: seconds for reading a response, and until the next request.
    """

    unauthenticated: int
    known: int = 1 << 20
    request: float = REQUEST_SECONDS
    idle: float = IDLE_SECONDS


class BoundedListener:
    """A web server for an aiohttp application, from start() to stop(). It adds a middleware to the application.

    turned_away: called with TooSlow or TooManyCallers for each connection that is closed for that reason.
    """

    def __init__(
        self, app: web.Application, bounds: ConnectionBounds, turned_away: Callable[[str], None] | None = None
    ) -> None:
        self.bounds = bounds
        self._turned_away = turned_away or (lambda reason: None)
        self._unauthenticated: UnauthenticatedConnections[_Connection] = UnauthenticatedConnections(
            bounds.unauthenticated
        )
        self._known: set[_Connection] = set()
        self._by_handler: dict[Any, _Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._app = app
        self._runner: web.AppRunner | None = None
        self._sockets: list[socket.socket] = []
        self._warned: dict[str, float] = {}
        app[LISTENER] = self
        app.middlewares.append(self._serve)

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Start to listen, and return the port. Raises OSError; stop() must be called even then."""
        loop = asyncio.get_running_loop()
        self._runner = runner = web.AppRunner(
            self._app, access_log=None, logger=_RequestLog(self.warn), shutdown_timeout=REQUESTS_END_SECONDS
        )
        await runner.setup()
        addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(addresses):
            self._sockets.append(_listening(family, address))
        assert runner.server is not None
        for listening in self._sockets:
            self._begin(self._accept(listening, runner.server, tls))
        bound: int = self._sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Stop accepting connections, and close all. May be called repeatedly, and without start()."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listening in self._sockets:
            listening.close()
        self._sockets.clear()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def unauthenticated(self) -> int:
        return len(self._unauthenticated)

    @property
    def full(self) -> bool:
        """Whether authenticated callers have reached their limit of connections."""
        return len(self._known) >= self.bounds.known

    def mark_authenticated(self, request: web.Request) -> None:
        """Mark the caller as authenticated: its connection has no time limit and is not closed for others."""
        if connection := self._by_handler.get(request.protocol):
            self._unauthenticated.remove(connection)
            self._known.add(connection)
            connection.rest(None)

    # connections

    async def _accept(self, listening: socket.socket, server: web.Server, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0)  # accept without waiting between queued callers, but let other tasks run
            try:
                accepted, address = await loop.sock_accept(listening)
            except ConnectionError:  # the caller has gone already
                continue
            except OSError as error:  # no descriptor or memory is left
                self.warn(f"cannot accept a connection: {system_reason(error)}")
                self._close_for_another(self._unauthenticated.evict())
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            connection = _Connection(accepted, server, self._gone)
            leaving = self._unauthenticated.admit(connection, str(address[0]))
            if leaving is connection:
                self._turned_away("TooManyCallers")
                accepted.close()
                continue
            self._close_for_another(leaving)
            self._by_handler[connection.handler] = connection
            connection.rest(self._late(connection, self.bounds.request))
            connection.task = task = self._begin(self._welcome(connection, tls))
            # A task that is cancelled before its first turn runs none of its code
            task.add_done_callback(partial(self._welcomed, connection))

    async def _welcome(self, connection: "_Connection", tls: ssl.SSLContext | None) -> None:
        """Connect the accepted socket to its protocol, after the TLS handshake if there is one. Raises OSError."""
        seconds = self.bounds.request
        limits = {"ssl_handshake_timeout": seconds, "ssl_shutdown_timeout": SHUTDOWN_SECONDS} if tls else {}
        connect = asyncio.get_running_loop().connect_accepted_socket
        await connect(lambda: connection, connection.socket, ssl=tls, **limits)

    def _welcomed(self, connection: "_Connection", task: asyncio.Task[None]) -> None:
        connection.task = None
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return
        if error is not None:
            logger.log(logging.DEBUG if isinstance(error, OSError) else logging.ERROR, "no connection: %r", error)
        connection.socket.close()
        self._gone(connection)

    def _gone(self, connection: "_Connection") -> None:
        connection.rest(None)
        self._unauthenticated.remove(connection)
        self._known.discard(connection)
        self._by_handler.pop(connection.handler, None)

    def _late(self, connection: "_Connection", seconds: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self._expire, connection)

    def _expire(self, connection: "_Connection") -> None:
        if not connection.asked:
            self._turned_away("TooSlow")
        connection.close()

    def _close_for_another(self, connection: "_Connection | None") -> None:
        if connection is not None:
            self._turned_away("TooManyCallers")
            self.warn(f"{self.bounds.unauthenticated} connections of unknown callers: the oldest are closed")
            connection.close()

    # requests

    @web.middleware
    async def _serve(self, request: web.Request, handler: Handler) -> Any:
        connection = self._by_handler.get(request.protocol)
        if connection is None:
            return await handler(request)
        connection.asked = True
        connection.rest(None)
        self._unauthenticated.mark(connection, busy=True)
        try:
            return await handler(request)
        finally:
            if connection in self._unauthenticated:
                self._unauthenticated.mark(connection, busy=False)
                connection.rest(self._late(connection, self.bounds.idle))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def warn(self, message: str) -> None:
        """Log a warning, but the same one at most once in QUIET_SECONDS, so that callers cannot fill the log."""
        now = asyncio.get_running_loop().time()
        if now - self._warned.get(message, -QUIET_SECONDS) >= QUIET_SECONDS:
            self._warned[message] = now
            logger.warning("%s", message)


LISTENER: web.AppKey[BoundedListener] = web.AppKey("listener", BoundedListener)


class _RequestLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's logger, without tracebacks for callers' errors: requests that are not HTTP or have too large a header.
    aiohttp answers these with 400; the log has at most one warning about them in QUIET_SECONDS.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__(logger)
        self._warn = warn

    def exception(self, msg: object, *args: object, exc_info: Any = True, **rest: Any) -> None:
        if isinstance(exc_info, HttpProcessingError):
            self._warn("a request was answered with 400: it is no HTTP, or a header is larger than 8 KiB")
        else:
            super().exception(msg, *args, exc_info=exc_info, **rest)


class _Connection(asyncio.Protocol):
    """A protocol that forwards the transport's events to aiohttp's handler. gone: called at the connection's end."""

    def __init__(self, accepted: socket.socket, server: web.Server, gone: Callable[["_Connection"], None]) -> None:
        self.socket, self.handler, self._gone = accepted, server(), gone
        self.task: asyncio.Task[None] | None = None  # None once its handshake is done
        self.asked = False
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Assigned directly, as they are called for each piece of data
        self.data_received = self.handler.data_received  # type: ignore[method-assign]
        self.pause_writing = self.handler.pause_writing  # type: ignore[method-assign]
        self.resume_writing = self.handler.resume_writing  # type: ignore[method-assign]
        self.eof_received = self.handler.eof_received  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.handler.connection_made(transport)

    def connection_lost(self, error: BaseException | None) -> None:
        self.handler.connection_lost(error)
        self._gone(self)

    def rest(self, timer: asyncio.TimerHandle | None) -> None:
        """Replace the timer that closes an inactive connection; None: no timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def close(self) -> None:
        """Close the connection at once, even with unsent data."""
        if self._transport is not None:
            self._transport.abort()
        elif self.task is not None:
            self.task.cancel()


def _listening(family: int, address: Any) -> socket.socket:
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setblocking(False)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind(address)
        found.listen(BACKLOG)
    except OSError:
        found.close()
        raise
    return found
