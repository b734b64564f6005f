"""The coordinator's end of the control channel: a server with one channel (WebSocket) per worker, on one asyncio loop.
It turns connections and received frames into events, and messages into frames. It decides nothing about a job.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from aiohttp import WSCloseCode, WSMsgType, web

from bamboo_core.control.codec import MAX_MESSAGE_BYTES, Frames, decode_from_worker, encode
from bamboo_core.control.protocol import ChannelClosed, ChannelEvent, Hello, Message, Received, Refused, WorkerJoined
from bamboo_core.names import PROTOCOL_VERSION
from bamboo_core.planning.plan import WorkerId
from bamboo_core.serving.listener import LISTENER, BoundedListener, ConnectionBounds


class TokenBucket:
    """A rate limiter: `rate` tokens per second, at most `burst` at once. Times are seconds of any monotonic clock."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst, self._left, self._at = rate, burst, burst, now

    def wait(self, now: float) -> float:
        """Take a token, even if none is left. Return the seconds to wait before the next call, 0 if one was left."""
        self._left = min(self._burst, self._left + (now - self._at) * self._rate) - 1
        self._at = now
        return max(0.0, -self._left / self._rate)


logger = logging.getLogger(__name__)

PATH = "/v1/workers"
HELLO_SECONDS = 5.0
REFUSED_HEADER = "Bamboo-Refused"  # header of a 403 answer: why
MOST_UNAUTHENTICATED = 256  # connections to this process's one job that have not been authenticated
MESSAGES_A_SECOND = 500.0  # of one worker; more are delayed
MESSAGES_AT_ONCE = 2000


class Unauthorized(Exception):
    """Refusal of a caller, who gets the text and should not try again. reason: a CamelCase word for metrics."""

    def __init__(self, message: str, reason: str = "Unauthorized") -> None:
        super().__init__(message)
        self.reason = reason


class Unavailable(Exception):
    """Temporary failure to authenticate a caller, who may try again."""


Authenticate = Callable[[web.Request], Awaitable[WorkerId | None]]


def token_check(token: str) -> Authenticate:
    """Return an authenticator that admits any worker with this bearer token: for workers on this machine."""

    async def authenticate(request: web.Request) -> WorkerId | None:
        offered = request.headers.get("Authorization", "")
        if not hmac.compare_digest(offered.encode(), f"Bearer {token}".encode()):
            raise Unauthorized("the token is wrong")
        return None

    return authenticate


@dataclass(eq=False, slots=True)
class _Channel:
    worker: WorkerId
    socket: web.WebSocketResponse
    outbox: asyncio.Queue[str | bytes] = field(default_factory=asyncio.Queue)

    async def write(self) -> None:
        """Send queued frames until the socket breaks or this task is cancelled."""
        with suppress(ConnectionError):
            while True:
                frame = await self.outbox.get()
                if isinstance(frame, str):
                    await self.socket.send_str(frame)
                else:
                    await self.socket.send_bytes(frame)


class Channels:
    """The channels of workers, usually of one job. Calls `on_event` in the loop that serves the requests.

    authenticate: called before the WebSocket is accepted. Returns the worker that the caller may be, None for
    any; raises Unauthorized for a caller that must go away, Unavailable for one that may try again. heartbeat: seconds
    without data from a worker, after which it gets a ping; after half of that without data, its channel is closed.
    """

    def __init__(
        self, on_event: Callable[[ChannelEvent], None], authenticate: Authenticate, *, heartbeat: float = 5.0
    ) -> None:
        self._on_event = on_event
        self._authenticate = authenticate
        self._heartbeat = heartbeat
        self._channels: dict[WorkerId, _Channel] = {}
        self._frames = Frames()
        self._sockets: set[web.WebSocketResponse] = set()
        self._closing: set[asyncio.Task[bool]] = set()
        self._closed = False

    async def close(self) -> None:
        """Close every connection. The channels that are open now cause no more events."""
        self._closed = True
        self._channels.clear()
        sockets = list(self._sockets)
        if sockets:
            closing = [asyncio.ensure_future(socket.close(code=WSCloseCode.GOING_AWAY)) for socket in sockets]
            _, late = await asyncio.wait(closing, timeout=0.5)
            for task in late:
                task.cancel()

    def send(self, worker: WorkerId, message: Message) -> None:
        """Queue the message. It is dropped if the worker has no channel: the worker sends Hello when it reconnects."""
        if (channel := self._channels.get(worker)) is not None:
            channel.outbox.put_nowait(self._frames.of(message))

    @property
    def connected(self) -> frozenset[WorkerId]:
        return frozenset(self._channels)

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        """Serve one worker's connection until it ends. Raises aiohttp's 403 or 503 if authentication fails."""
        known_as = await self._admit(request)
        socket = web.WebSocketResponse(heartbeat=self._heartbeat, max_msg_size=MAX_MESSAGE_BYTES)
        await socket.prepare(request)
        if self._closed:
            await socket.close(code=WSCloseCode.GOING_AWAY)
            return socket
        self._sockets.add(socket)
        try:
            if (hello := await self._greet(request, socket, known_as)) is not None:
                if listener := request.app.get(LISTENER):
                    listener.mark_authenticated(request)
                await self._serve(hello, socket)
        finally:
            self._sockets.discard(socket)
        return socket

    async def _admit(self, request: web.Request) -> WorkerId | None:
        try:
            return await self._authenticate(request)
        except Unauthorized as error:
            logger.warning("refused a caller from %s: %s", request.remote, error)
            raise web.HTTPForbidden(headers={REFUSED_HEADER: str(error)}, text=f"{error}\n") from None
        except Unavailable as error:
            logger.warning("cannot check who calls from %s: %s", request.remote, error)
        except Exception:
            logger.exception("cannot check who calls from %s", request.remote)
        raise web.HTTPServiceUnavailable(headers={"Retry-After": "1"})

    async def _greet(
        self, request: web.Request, socket: web.WebSocketResponse, known_as: WorkerId | None
    ) -> Hello | None:
        """Return the caller's Hello. Without an acceptable one in time, close the socket and return None."""
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = await self._receive(socket, request.remote or "?")
        except TimeoutError:
            logger.warning("no Hello from %s within %g s", request.remote, HELLO_SECONDS)
            await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"no Hello")
            return None
        if hello is None:
            return None
        if not isinstance(hello, Hello):
            logger.warning("the first message from %s was not a Hello", request.remote)
            await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"the first message must be Hello")
            return None
        if hello.version != PROTOCOL_VERSION:
            await self._refuse(
                socket, hello, "ProtocolMismatch", f"protocol {hello.version}, expected {PROTOCOL_VERSION}"
            )
            return None
        if known_as not in (None, hello.worker):
            await self._refuse(socket, hello, "Unauthorized", f"this is {known_as}, not {hello.worker}")
            return None
        return hello

    async def _refuse(self, socket: web.WebSocketResponse, hello: Hello, reason: str, message: str) -> None:
        logger.warning("refused %s: %s", hello.worker, message, extra={"worker": hello.worker})
        with suppress(ConnectionError):
            await socket.send_str(encode(Refused(reason=reason, message=message)).decode())
        await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=reason.encode())

    async def _serve(self, hello: Hello, socket: web.WebSocketResponse) -> None:
        channel = _Channel(hello.worker, socket)
        older = self._channels.get(hello.worker)
        self._channels[hello.worker] = channel
        writer = asyncio.create_task(channel.write())
        bucket = TokenBucket(MESSAGES_A_SECOND, MESSAGES_AT_ONCE, time.monotonic())
        if older is not None:
            closing = asyncio.create_task(older.socket.close(code=WSCloseCode.OK))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        try:
            self._on_event(WorkerJoined(hello))
            while (message := await self._receive(socket, hello.worker)) is not None:
                if self._channels.get(hello.worker) is not channel:
                    break
                self._on_event(Received(hello.worker, message))
                if wait := bucket.wait(time.monotonic()):
                    await asyncio.sleep(wait)
        finally:
            writer.cancel()
            if self._channels.get(hello.worker) is channel:
                del self._channels[hello.worker]
                self._on_event(ChannelClosed(hello.worker))

    async def _receive(self, socket: web.WebSocketResponse, sender: str) -> Message | None:
        """Return the next message; None once the socket is closed or broken. Close it after an invalid frame."""
        try:
            frame = await socket.receive()
        except ConnectionError as error:  # it answered a ping of a peer that has gone
            logger.debug("the channel of %s broke: %s", sender, error)
            return None
        if frame.type in (WSMsgType.TEXT, WSMsgType.BINARY):
            try:
                return decode_from_worker(frame.data)
            except ValueError as error:
                logger.warning("closed the channel of %s: %s", sender, error, extra={"worker": sender})
                await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"malformed message")
        elif frame.type is WSMsgType.ERROR:
            logger.warning("the channel of %s broke: %s", sender, frame.data, extra={"worker": sender})
        return None


class ControlServer(Channels):
    """A server, on its own port, for the channels of one job's workers."""

    _listener: BoundedListener | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen, and return the URL to which workers connect. port: 0 for a free one."""
        app = web.Application()
        app.router.add_get(PATH, self.handle)
        self._listener = BoundedListener(app, ConnectionBounds(unauthenticated=MOST_UNAUTHENTICATED))
        bound = await self._listener.start(host, port)
        return f"ws://{host}:{bound}{PATH}"

    async def stop(self) -> None:
        """Close every channel and stop listening; no more events follow."""
        await self.close()
        if self._listener is not None:
            await self._listener.stop()
            self._listener = None
