"""The sending end of a link: one writer thread that connects, sends what is queued and connects again.

A small frame is sent by the caller's own thread if the kernel takes it at once: waking the writer, which then waits
for the interpreter's lock, takes longer than such a frame's whole way.
"""

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from bamboo.planning.plan import WorkerId
from bamboo_trainer.transport import sockets, wire

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
ACCEPT_SECONDS = 10.0  # longer than an acceptor may wait for the plan that names us
BACKOFF_SECONDS = (0.05, 1.0)
AT_ONCE = 64 << 10  # bytes that the caller itself may send
PIECE = 256 << 10  # bytes between two looks at the rate

Report = Callable[["Outbound"], None]


class Outbound:
    """A link to one lane of one peer. on_broke and on_stands are called by its thread, without its lock."""

    def __init__(
        self,
        route: tuple[WorkerId, WorkerId, wire.Lane],
        secret: bytes,
        address: tuple[str, int],
        on_broke: Report,
        on_stands: Report,
        rate: float | None = None,
    ) -> None:
        """rate: bytes a second that it sends at most."""
        self.me, self.peer, self.lane = route
        self._secret = secret
        self._address = address
        self._on_broke = on_broke
        self._on_stands = on_stands
        self._rate = rate
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[list[wire.Buffer]] = deque()
        self._sock: socket.socket | None = None
        self._standing = False  # the socket is past the handshake
        self._broken = False  # what is sent is dropped
        self._lost = False  # the current connection has ended at the other side
        self._sending = False
        self._closed = False
        self._attempts = 0  # a name with several addresses: each in turn
        self.thread = threading.Thread(target=self._run, name=f"bamboo-tx-{self.peer}-{self.lane}", daemon=True)

    def send(self, buffers: list[wire.Buffer]) -> None:
        with self._lock:
            if self._closed or self._broken:
                logger.debug("frame to %s dropped: its %s link is down", self.peer, self.lane)
                return
            rest = self._send_at_once(buffers)
            if rest:
                self._queue.append(rest)
                self._changed.notify_all()

    def _send_at_once(self, buffers: list[wire.Buffer]) -> list[wire.Buffer]:
        """Send what does not block; the rest. Caller holds the lock."""
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

    def flush(self, seconds: float) -> bool:
        """Wait until nothing is queued; False if there still is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._sending, max(0.0, seconds))

    def close(self) -> None:
        """Drop what is queued and end the thread soon; never blocks."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            if self._sock is not None:
                sockets.wake(self._sock)
            self._changed.notify_all()

    def _run(self) -> None:
        backoff, longest = BACKOFF_SECONDS
        while not self._closed:
            began = time.monotonic()
            try:
                self._link()
            except (
                OSError,
                ValueError,
                OverflowError,
                wire.WireError,
            ) as error:
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
        """Everything queued is lost. False if closed."""
        with self._changed:
            self._broken = True
            self._sending = False
            self._queue.clear()
            self._changed.notify_all()
            return not self._closed

    def _link(self) -> None:
        """Form the link and send over it until it breaks (an exception) or is closed (a return)."""
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
        """A socket past the handshake; closed in the end."""
        host, port = self._address
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[self._attempts % len(found)]
        self._attempts += 1
        with socket.socket(family, kind, protocol) as sock:
            with self._changed:
                if self._closed:
                    raise ConnectionAbortedError("closed")
                self._sock, self._lost = sock, False
            try:
                sock.settimeout(CONNECT_SECONDS)
                sock.connect(address)
                sockets.tune(sock)
                nonce = bytes(sockets.receive(sock, wire.NONCE_SIZE, time.monotonic() + CONNECT_SECONDS))
                sock.sendall(wire.encode_hello(self._secret, nonce, self.me, self.peer, self.lane))
                if sockets.receive(sock, 1, time.monotonic() + ACCEPT_SECONDS) != wire.ACCEPTED:
                    raise wire.WireError("not accepted")
                sock.settimeout(None)
                yield sock
            finally:
                with self._changed:
                    self._sock, self._standing = None, False

    def _stand(self) -> None:
        with self._changed:
            self._broken, self._standing = False, True
        self._on_stands(self)

    def _watch(self, sock: socket.socket) -> None:
        """The acceptor never speaks again: whatever can be read is the end of the link."""
        with contextlib.suppress(OSError):
            sock.recv(1)
        sockets.wake(sock)
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def _send_some(self, sock: socket.socket) -> bool:
        """Wait for frames, send one large or some small ones. False when closed."""
        with self._changed:
            self._sending = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._queue or self._lost or self._closed)
            if self._closed:
                return False
            if self._lost:
                raise ConnectionResetError("closed by the peer")
            buffers, size = [], 0
            while self._queue and size < wire.COALESCE:
                frame = self._queue.popleft()
                buffers += frame
                size += sum(map(len, frame))
            self._sending = True
        for buffer in wire.coalesce(buffers):
            if self._rate is None:
                sock.sendall(buffer)
            else:
                self._send_slowly(sock, buffer, self._rate)
        return True

    def _send_slowly(self, sock: socket.socket, buffer: wire.Buffer, rate: float) -> None:
        view, due = memoryview(buffer), time.monotonic()
        while len(view) and not self._closed:
            sock.sendall(view[:PIECE])
            due += min(PIECE, len(view)) / rate
            view = view[PIECE:]
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._lost, max(0.0, due - time.monotonic()))
