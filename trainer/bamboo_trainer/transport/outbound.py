"""The sending end of a link: a writer thread that connects, sends what is queued, and reconnects.

The caller's own thread sends a small frame if the kernel takes it at once: waking the writer, which then waits for the
interpreter's lock, takes longer than sending such a frame.
"""

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from bamboo_core.planning.plan import WorkerId
from bamboo_trainer.transport import sockets, stripes, wire

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
ACCEPT_SECONDS = 10.0  # longer than an acceptor may wait for the plan that names this worker
BACKOFF_SECONDS = (0.05, 1.0)
AT_ONCE = 64 << 10  # bytes that the caller itself may send

Report = Callable[["Outbound"], None]


Queued = wire.Encoded | list[wire.Buffer]  # a striped frame, or the unsent bytes of others


class Outbound:
    """A link to one lane of one peer. Its thread calls on_broke and on_stands without holding its lock."""

    def __init__(
        self,
        route: tuple[WorkerId, WorkerId, wire.Lane],
        secret: bytes,
        address: tuple[str, int],
        on_broke: Report,
        on_stands: Report,
        flows: int,
        rate: float | None,
    ) -> None:
        """flows: connections that large bodies are spread over. rate: the most bytes that the link sends a second."""
        self.me, self.peer, self.lane = route
        self._secret = secret
        self._address = address
        self._on_broke = on_broke
        self._on_stands = on_stands
        self._flows, self._rate = flows, rate
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Queued] = deque()
        self._sock: socket.socket | None = None
        # Of the current connection:
        self._nonce = b""  # the acceptor's nonce of this connection
        self._further: list[socket.socket] = []  # others that have joined it, for parts of large bodies
        self._spread = False  # they were opened
        self._standing = False  # the handshake is done
        self._lost = False  # the other side has ended it
        self._due = 0.0  # when the rate allows more
        self._broken = False  # what is sent is dropped
        self._sending = False
        self._closed = False
        self._attempts = 0  # a name with several addresses: each in turn
        self.thread = threading.Thread(target=self._run, name=f"bamboo-tx-{self.peer}-{self.lane}", daemon=True)

    def send(self, frame: wire.Encoded) -> None:
        """Queue a frame, or send it at once if that is quicker."""
        with self._lock:
            if self._closed or self._broken:
                logger.debug("frame to %s dropped: its %s link is down", self.peer, self.lane)
                return
            rest = frame if frame.striped else self._send_at_once(frame.buffers)
            if rest:
                self._queue.append(rest)
                self._changed.notify_all()

    def _send_at_once(self, buffers: list[wire.Buffer]) -> list[wire.Buffer]:
        """Send what does not block; return the rest. The caller holds the lock."""
        sock = self._sock
        if sock is None or not self._standing or self._sending or self._queue or sum(map(len, buffers)) > AT_ONCE:
            return buffers
        data = b"".join(buffers)
        try:
            count = sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            count = 0
        except OSError:
            return buffers  # the writer meets the same error, and reports it
        return [memoryview(data)[count:]] if count < len(data) else []

    @property
    def is_sending(self) -> bool:
        """Return whether anything is queued or being sent."""
        with self._lock:
            return bool(self._queue) or self._sending

    def flush(self, seconds: float) -> bool:
        """Wait until nothing is queued; return False if something still is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._sending, max(0.0, seconds))

    def close(self) -> None:
        """Drop what is queued and end the thread soon; never blocks."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._wake()
            self._changed.notify_all()

    def _wake(self) -> None:
        """Wake all threads that wait for the link. The caller holds the lock."""
        for sock in (self._sock, *self._further):
            if sock is not None:
                sockets.wake(sock)

    def _run(self) -> None:
        backoff, longest = BACKOFF_SECONDS
        while not self._closed:
            began = time.monotonic()
            try:
                self._link()
            except (OSError, ValueError, OverflowError, wire.WireError) as error:
                if not self._closed:
                    level = logging.DEBUG if self._broken else logging.WARNING
                    logger.log(level, "%s link to %s broke: %s", self.lane, self.peer, error)
            if time.monotonic() - began > longest:
                backoff = BACKOFF_SECONDS[0]
            if self._drop():
                self._on_broke(self)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, backoff)
                backoff = min(2 * backoff, longest)

    def _drop(self) -> bool:
        """Drop everything queued. Return False if closed."""
        with self._changed:
            self._broken = True
            self._sending = False
            self._queue.clear()
            self._changed.notify_all()
            return not self._closed

    def _link(self) -> None:
        """Form the link and send over it until it breaks (raises) or is closed (returns)."""
        with self._connected() as sock:
            watcher = threading.Thread(
                target=self._watch, args=(sock,), name=f"bamboo-eof-{self.peer}-{self.lane}", daemon=True
            )
            watcher.start()
            try:
                self._stand()
                while self._send_some(sock):
                    pass
            finally:
                sockets.wake(sock)
                watcher.join(CONNECT_SECONDS)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        """Yield a socket past the handshake; close it in the end, with those that have joined it."""
        host, port = self._address
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[self._attempts % len(addresses)]
        self._attempts += 1
        with socket.socket(family, kind, protocol) as sock:
            with self._changed:
                if self._closed:
                    raise ConnectionAbortedError("closed")
                self._sock, self._lost, self._spread = sock, False, False
            try:
                self._nonce = self._greet(sock, address)
                with self._changed:
                    if self._closed or self._lost:
                        raise ConnectionAbortedError("closed")
                yield sock
            finally:
                with self._changed:
                    ended, self._further = self._further, []
                    self._sock, self._standing = None, False
                for further in ended:
                    further.close()

    def _greet(self, sock: socket.socket, address: Any, joins: bytes = b"") -> bytes:
        """Connect and authenticate; return the acceptor's nonce. Raises OSError, WireError."""
        sock.settimeout(CONNECT_SECONDS)
        sock.connect(address)
        sockets.tune(sock)
        nonce = bytes(sockets.receive(sock, wire.NONCE_SIZE, time.monotonic() + CONNECT_SECONDS))
        sock.sendall(wire.encode_hello(self._secret, nonce, self.me, self.peer, self.lane, joins))
        if sockets.receive(sock, 1, time.monotonic() + ACCEPT_SECONDS) != wire.ACCEPTED:
            raise wire.WireError("not accepted")
        sock.settimeout(None)
        return nonce

    def _spread_out(self, first: socket.socket) -> None:
        """Have further connections join the link, for its first large frame: a small job needs one connection a link.
        It works with fewer. Raises OSError if the link has ended.
        """
        self._spread = True
        while len(self._further) < self._flows - 1:
            with self._changed:
                if self._closed or self._lost:
                    raise ConnectionAbortedError("closed")
                sock = socket.socket(first.family, first.type, first.proto)
                self._further.append(sock)  # at once, so that `_wake` reaches it
            try:
                self._greet(sock, first.getpeername(), joins=self._nonce)
            except (OSError, wire.WireError) as error:
                with self._changed:
                    self._further.remove(sock)
                    sock.close()
                    if self._closed or self._lost:
                        raise ConnectionAbortedError("closed") from error
                have = f"{1 + len(self._further)} of {self._flows}"
                logger.warning("%s link to %s has %s connections: %s", self.lane, self.peer, have, error)
                return

    def _stand(self) -> None:
        with self._changed:
            self._broken, self._standing = False, True
        self._on_stands(self)

    def _watch(self, sock: socket.socket) -> None:
        """Wait for the end of the link: after the handshake the acceptor sends nothing."""
        try:
            sock.recv(1)
        except OSError as error:
            logger.debug("%s link to %s ended: %s", self.lane, self.peer, error)
        sockets.wake(sock)
        with self._changed:
            self._lost = True
            self._wake()
            self._changed.notify_all()

    def _send_some(self, sock: socket.socket) -> bool:
        """Wait for frames, then send one large or several small ones. Return False when closed."""
        with self._changed:
            self._sending = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._queue or self._lost or self._closed)
            if self._closed:
                return False
            if self._lost:
                raise ConnectionResetError("closed by the peer")
            frame = self._queue.popleft()
            buffers = [] if isinstance(frame, wire.Encoded) else frame
            size = sum(map(len, buffers))
            while buffers and self._queue and size < wire.COALESCE and isinstance(more := self._queue[0], list):
                self._queue.popleft()
                buffers += more
                size += sum(map(len, more))
            self._sending = True
        if isinstance(frame, wire.Encoded):
            if not self._spread:
                self._spread_out(sock)
            flows = [sock, *self._further]
            sock.sendall(frame.head + bytes([len(flows)]))
            stripes.send_body(frame.buffers[1:], flows, self._pace)
        for buffer in wire.coalesce(buffers):
            if self._rate is None:
                sock.sendall(buffer)
            else:
                stripes.send_body([buffer], [sock], self._pace)
        return True

    def _pace(self, size: int) -> None:
        """Wait until the link's rate allows this many bytes more. Raises OSError if the link ends meanwhile."""
        if self._rate is None:
            return
        with self._changed:
            if self._changed.wait_for(lambda: self._closed or self._lost, max(0.0, self._due - time.monotonic())):
                raise ConnectionAbortedError("closed")
        self._due = max(self._due, time.monotonic()) + size / self._rate
