"""The worker's end of the control channel: a thread that keeps one WebSocket to the coordinator open. While the
coordinator is away, training goes on, and messages wait in a queue.
"""

import asyncio
import logging
import ssl
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import aiohttp

from bamboo_core.control.codec import MAX_MESSAGE_BYTES, decode_from_coordinator, encode
from bamboo_core.control.protocol import Heartbeat, Hello, Message, Refused, ToWorker
from bamboo_core.control.server import REFUSED_HEADER
from bamboo_core.names import HEARTBEAT_SECONDS

logger = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.05
LAST_BACKOFF_SECONDS = 2.0
PING_SECONDS = 5.0
CONNECT_SECONDS = 3.0
HANDSHAKE_SECONDS = 10.0
CLOSE_SECONDS = 0.02  # lets the closed session's connections end, in a few turns of the loop


class Control:
    """A worker's connection to its coordinator: a thread that reconnects whenever the WebSocket breaks. Callbacks run
    in that thread. They must not block or raise, except that `token` raises OSError while there is no token yet.

    token: returns the bearer token. hello: returns the first message of each connection. heartbeat: returns the next
    heartbeat. deliver: gets each message of the coordinator, and a `Refused` for a 403 answer with REFUSED_HEADER.
    authority: PEM of the certificate authority of a wss: coordinator; "" for the authorities that this machine trusts.
    """

    def __init__(
        self,
        url: str,
        token: Callable[[], str],
        hello: Callable[[], Hello],
        heartbeat: Callable[[], Heartbeat],
        deliver: Callable[[ToWorker], None],
        authority: str = "",
    ) -> None:
        self._url = url
        self._token = token
        self._hello = hello
        self._heartbeat = heartbeat
        self._deliver = deliver
        self._tls = ssl.create_default_context(cadata=authority) if authority else True
        self._outbox: deque[Message] = deque()  # a message leaves it once written
        self._written = threading.Event()
        self._written.set()
        self._lock = threading.Lock()  # guards _loop, _closed, and changes of _outbox with _written
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="bamboo-control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: Message, *, late: bool = False) -> None:
        """Queue a message for the coordinator. Any thread may call this; it never blocks. Does nothing after `close`.

        late: the message may wait until another message or a heartbeat is sent, or `wake` is called. Waking the sending
        thread now would soon take the interpreter's lock (GIL) from the caller, which may have urgent work.
        """
        with self._lock:
            if self._closed:
                return
            self._outbox.append(message)
            self._written.clear()
        if not late:
            self.wake()

    def wake(self) -> None:
        """Send the queued messages now. Any thread may call this; it never blocks."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._wake.set)

    def close(self, flush_seconds: float = 1.0) -> None:
        """Close once all queued messages are written, or after `flush_seconds`, and wait up to 2 s for the thread to
        end. May be called twice.
        """
        if self._thread.is_alive():
            self.wake()
            self._written.wait(flush_seconds)
        with self._lock:
            self._closed = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        try:
            asyncio.run(self._keep_connected())
        except Exception:
            logger.exception("the control channel's thread ended")

    async def _keep_connected(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._loop = asyncio.get_running_loop()
            self._wake.set()
        backoff = FIRST_BACKOFF_SECONDS
        try:
            limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
            async with aiohttp.ClientSession(timeout=limits) as session:
                while not self._stop.is_set():
                    if await self._connect(session):
                        backoff = FIRST_BACKOFF_SECONDS
                    with suppress(TimeoutError):
                        async with asyncio.timeout(backoff):
                            await self._stop.wait()
                    backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)
            await asyncio.sleep(CLOSE_SECONDS)
        finally:
            with self._lock:
                self._loop = None

    async def _connect(self, session: aiohttp.ClientSession) -> bool:
        """Serve one connection until it breaks or `close` is called. Return whether the coordinator sent anything.

        Network errors are only logged; a refusal with a reason (403, REFUSED_HEADER) is delivered as `Refused`.
        """
        received = False

        async def read(socket: aiohttp.ClientWebSocketResponse) -> None:
            nonlocal received
            async for frame in socket:
                if frame.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                    received = True
                    self._receive(frame.data)

        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                opened = await self._open(session)
            async with opened as socket:
                await socket.send_str(encode(self._hello()).decode())
                await until_first(read(socket), self._write(socket), self._beat(socket), self._stop.wait())
        except aiohttp.WSServerHandshakeError as error:
            why = error.headers.get(REFUSED_HEADER) if error.headers else None
            if error.status == HTTPStatus.FORBIDDEN and why:  # a proxy's refusal has no such header
                self._deliver(Refused(reason="Unauthorized", message=why))
            logger.debug("the coordinator answers %d", error.status)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.debug("no channel to the coordinator: %s", error)
        return received

    async def _open(self, session: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket to the coordinator, authenticated by the bearer token."""
        return await session.ws_connect(
            self._url,
            ssl=self._tls,
            headers={"Authorization": f"Bearer {self._token()}"},
            heartbeat=PING_SECONDS,
            max_msg_size=MAX_MESSAGE_BYTES,
            timeout=aiohttp.ClientWSTimeout(ws_close=0.5),
        )

    def _receive(self, data: str | bytes) -> None:
        try:
            message = decode_from_coordinator(data)
        except ValueError as error:
            logger.warning("ignored a message of the coordinator: %s", error)
        else:
            self._deliver(message)

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            while self._outbox:
                await socket.send_str(encode(self._outbox[0]).decode())
                with self._lock:
                    self._outbox.popleft()
                    if not self._outbox:
                        self._written.set()
            self._wake.clear()
            if not self._outbox:
                await self._wake.wait()

    async def _beat(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            await socket.send_str(encode(self._heartbeat()).decode())
            self._wake.set()


async def until_first(*parts: Coroutine[Any, Any, Any]) -> None:
    """Run coroutines concurrently until the first ends; cancel the others, and raise the first one's exception."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for task, result in zip(tasks, results, strict=True):
        if task in done and isinstance(result, Exception):
            raise result
