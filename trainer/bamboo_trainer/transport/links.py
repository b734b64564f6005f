"""A link's two ends: one thread connects and sends, another authenticates the sender and reads straight into tensors.

A link has several connections ("flows"), because clouds limit the rate of one. Every frame's header and meta, and small
frames whole, travel on the link's first flow. The body of a large one is cut into equal parts, one for each flow. One
thread sends on all flows and one reads from all: copying is not what limits a link on a fast network.

The sending end (`Outbound`): a writer thread connects, sends what is queued, and reconnects. The caller's own thread
sends a small frame if the kernel takes it at once: waking the writer, which then waits for the interpreter's lock,
takes longer than sending such a frame.

The receiving end (`Inbound`): a connection that joins a link passes to that link's reader once its sender is proven,
and its own thread ends.
"""

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from bamboo_core.complaints import said_by
from bamboo_core.planning.plan import WorkerId
from bamboo_trainer.frames import Frame, byte_view
from bamboo_trainer.transport import wire
from bamboo_trainer.transport.base import Buffer
from bamboo_trainer.transport.wire import Lane

if TYPE_CHECKING:
    from bamboo_trainer.transport.tcp import TcpTransport


def tune(sock: socket.socket) -> None:
    """Configure a socket to send small frames without delay, and to detect a vanished node by keepalive."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def wake(sock: socket.socket) -> None:
    """Shut a socket down, so that threads blocked in it return; only its own thread closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def receive(sock: socket.socket, size: int, deadline: float) -> bytearray:
    """Return the next bytes from a socket. Raises ConnectionError if it ends first, TimeoutError past the (monotonic)
    deadline.
    """
    buffer = bytearray()
    while len(buffer) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the peer is too slow")
        sock.settimeout(left)
        data = sock.recv(size - len(buffer))
        if not data:
            raise ConnectionResetError("closed by the peer")
        buffer += data
    return buffer


def after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return the views without their first `count` bytes."""
    for at, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[at + 1 :]]
        count -= len(view)
    return []


READ_AHEAD: Final = 64 << 10  # bytes, so that a small frame takes one system call


def read(reader: "BufferedReader[socket.SocketIO]", size: int) -> bytes:
    """Return the next bytes from a link. Raises ConnectionError if it ends first."""
    data = reader.read(size)
    if len(data) < size:
        raise ConnectionResetError("closed by the peer")
    return data


def read_into(reader: "BufferedReader[socket.SocketIO]", view: memoryview) -> None:
    """Fill the view from a link. Raises ConnectionError if it ends first."""
    if reader.readinto(view) < len(view):
        raise ConnectionResetError("closed by the peer")


class LinkStates:
    """The broken links of one direction. When several lanes break together, only the first break is reported.

    Each recovery is reported, because frames for a lane that was still broken were dropped when another one recovered.
    """

    def __init__(self) -> None:
        self._broken: set[tuple[WorkerId, Lane]] = set()
        self._reported: set[WorkerId] = set()

    def broke(self, peer: WorkerId, lane: Lane) -> bool:
        """Record a break; return whether a LinkDown is due."""
        if (peer, lane) in self._broken:
            return False
        self._broken.add((peer, lane))
        due = peer not in self._reported
        self._reported.add(peer)
        return due

    def stands(self, peer: WorkerId, lane: Lane) -> bool:
        """Record a recovery; return whether a LinkUp is due."""
        if (peer, lane) not in self._broken:
            return False
        self._broken.discard((peer, lane))
        self._reported.discard(peer)
        return True

    def forget(self, peer: WorkerId) -> None:
        self._reported.discard(peer)
        self._broken = {(other, lane) for other, lane in self._broken if other != peer}


MAX_FLOWS: Final = 16  # of one link
PIECE: Final = 256 << 10  # bytes sent between two checks of the rate


def parts_of(body: Sequence[wire.Buffer], count: int) -> list[list[memoryview]]:
    """Cut buffers, as one range of bytes, into `count` equal parts, each a list of views."""
    size = sum(map(len, body))
    bounds, parts = [size * index // count for index in range(count + 1)], []
    for start, stop in pairwise(bounds):
        views, begin = [], 0
        for buffer in body:
            views.append(memoryview(buffer)[max(0, start - begin) : max(0, stop - begin)])
            begin += len(buffer)
        parts.append([view for view in views if len(view)])
    return parts


def send_body(body: Sequence[wire.Buffer], flows: Sequence[socket.socket], pace: Callable[[int], None]) -> None:
    """Send a body over all flows. Raises OSError as soon as one of them is lost, or shut down by another thread.

    pace: called with the size of each piece once that is sent.
    """

    def send(flow: socket.socket, view: memoryview) -> int:
        count = flow.send(view[:PIECE], socket.MSG_DONTWAIT)
        pace(count)
        return count

    _move(flows, parts_of(body, len(flows)), select.POLLOUT, send)


def receive_body(
    body: Sequence[memoryview], flows: Sequence[socket.socket], first: "BufferedReader[socket.SocketIO]"
) -> None:
    """Fill a body from all flows. Raises OSError if one of them is lost, or shut down by another thread.

    first: reads the first flow, and may already hold some of its part.
    """
    parts = parts_of(body, len(flows))
    flows[0].setblocking(False)
    left = len(first.peek())
    flows[0].setblocking(True)
    while left and parts[0]:
        count = first.readinto(parts[0][0][:left])
        left, parts[0] = left - count, after(parts[0], count)
    _move(flows, parts, select.POLLIN, lambda flow, view: flow.recv_into(view, 0, socket.MSG_DONTWAIT))


def _move(
    flows: Sequence[socket.socket],
    parts: Sequence[list[memoryview]],
    event: int,
    move: Callable[[socket.socket, memoryview], int],
) -> None:
    """Move each flow's part. move: sends or receives some of it without waiting, and returns the number of bytes."""
    poller = select.poll()
    left = {flow.fileno(): (flow, part) for flow, part in zip(flows, parts, strict=True) if part}
    for fd in left:
        poller.register(fd, event)
    while left:
        for fd, _ in poller.poll():
            flow, views = left[fd]
            try:
                count = move(flow, views[0])
            except BlockingIOError:
                continue
            if not count:
                raise ConnectionResetError("a connection of it was closed by the peer")
            left[fd] = flow, after(views, count)
            if not left[fd][1]:
                poller.unregister(fd)
                del left[fd]


logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
ACCEPT_SECONDS = 10.0  # longer than an acceptor may wait for the plan that names this worker
BACKOFF_SECONDS = (0.05, 1.0)
AT_ONCE = 64 << 10  # bytes that the caller itself may send

Report = Callable[["Outbound"], None]


Queued = wire.Encoded | list[wire.Buffer]  # a striped frame, or the unsent bytes of others


class Outbound:
    """The sending end of a link to one lane of one peer. Its thread calls on_broke and on_stands without holding its
    lock.
    """

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
        """route: this worker, peer, lane. flows: connections for large bodies. rate: limit in bytes per second."""
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
        self._further: list[socket.socket] = []  # further connections that have joined it, for parts of large bodies
        self._spread = False  # those were opened, as far as possible
        self._standing = False  # the handshake is done
        self._lost = False  # the other side has ended it
        self._due = 0.0  # when the rate allows more
        self._broken = False  # `send` drops frames
        self._sending = False
        self._closed = False
        self._attempts = 0  # a name with several addresses: each in turn
        self.thread = threading.Thread(target=self._run, name=f"bamboo-tx-{self.peer}-{self.lane}", daemon=True)

    def send(self, frame: wire.Encoded) -> None:
        """Send a small frame at once if the kernel takes it, else queue it. Dropped while the link is down."""
        with self._lock:
            if self._closed or self._broken:
                logger.debug("frame to %s dropped: its %s link is down", self.peer, self.lane)
                return
            rest = frame if frame.striped else self._send_at_once(frame.buffers)
            if rest:
                self._queue.append(rest)
                self._changed.notify_all()

    def _send_at_once(self, buffers: list[wire.Buffer]) -> list[wire.Buffer]:
        """Send as much of a small frame as the kernel takes at once; return the rest. The caller holds the lock."""
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
        """Wait until every queued frame is sent; return False if that takes longer than `seconds`."""
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
                wake(sock)

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
        """Mark the link as broken and drop its queue. Return False if it is closed."""
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
                with self._changed:
                    self._broken, self._standing = False, True
                self._on_stands(self)
                while self._send_some(sock):
                    pass
            finally:
                wake(sock)
                watcher.join(CONNECT_SECONDS)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        """Yield a socket past the handshake; close it in the end, with the link's further connections."""
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
        tune(sock)
        nonce = bytes(receive(sock, wire.NONCE_SIZE, time.monotonic() + CONNECT_SECONDS))
        sock.sendall(wire.encode_hello(self._secret, nonce, self.me, self.peer, self.lane, joins))
        if receive(sock, 1, time.monotonic() + ACCEPT_SECONDS) != wire.ACCEPTED:
            raise wire.WireError("not accepted")
        sock.settimeout(None)
        return nonce

    def _spread_out(self, first: socket.socket) -> None:
        """Open the further connections of the link, before its first large frame, since a small job needs only one. The
        link works with fewer. Raises OSError if the link has ended.
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

    def _watch(self, sock: socket.socket) -> None:
        """Wait for the end of the link: after the handshake the acceptor sends nothing."""
        try:
            sock.recv(1)
        except OSError as error:
            logger.debug("%s link to %s ended: %s", self.lane, self.peer, error)
        wake(sock)
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
            send_body(frame.buffers[1:], flows, self._pace)
        for buffer in wire.coalesce(buffers):
            if self._rate is None:
                sock.sendall(buffer)
            else:
                send_body([buffer], [sock], self._pace)
        return True

    def _pace(self, size: int) -> None:
        """Wait until the link's rate allows this many bytes more. Raises OSError if the link ends meanwhile."""
        if self._rate is None:
            return
        with self._changed:
            if self._changed.wait_for(lambda: self._closed or self._lost, max(0.0, self._due - time.monotonic())):
                raise ConnectionAbortedError("closed")
        self._due = max(self._due, time.monotonic()) + size / self._rate


HELLO_SECONDS = 5.0


class Inbound:
    """The receiving end of a link: an accepted connection, and the connections that joined it."""

    def __init__(
        self, sock: socket.socket, me: WorkerId, secret: bytes, acceptor: "TcpTransport", buffer: Buffer
    ) -> None:
        """acceptor: called on this link's thread. buffer: allocates the memory that tensors are read into."""
        self._sock = sock
        self._me = me
        self._secret = secret
        self._acceptor = acceptor
        self._buffer = buffer
        self._joined: list[socket.socket] | None = None  # for parts of large bodies, while the link is admitted
        self.nonce = os.urandom(wire.NONCE_SIZE)
        self.hello: wire.LinkHello | None = None  # set once it is proven
        self._lock = threading.Lock()
        self._given_away = False
        self.thread = threading.Thread(target=self._run, name="bamboo-rx", daemon=True)

    def close(self) -> None:
        """End the thread soon; never blocks."""
        with self._lock:
            wake(self._sock)
            for sock in self._joined or ():
                wake(sock)

    def take_in(self, sock: socket.socket) -> bool:
        """Let a proven connection join this link, and accept it. Return False if the link is full or has ended. Raises
        OSError if the sender cannot be answered.
        """
        with self._lock:
            if self._joined is None or len(self._joined) >= MAX_FLOWS - 1:
                return False
            sock.setblocking(False)
            sock.sendall(wire.ACCEPTED)
            self._joined.append(sock)
            return True

    def _run(self) -> None:
        reason = "ended by an error"
        try:
            reason = self._serve()
        finally:
            with self._lock:
                joined, self._joined = self._joined or [], None
            for sock in joined:
                sock.close()
            if not self._given_away:
                self._sock.close()
            self._acceptor.left(self, reason)

    def _serve(self) -> str:
        """Authenticate the sender and deliver its frames; return why the link ended."""
        try:
            hello = self._greet()
            if hello.joins:
                self._given_away = self._acceptor.join(self._sock, hello)
                return "joined another one" if self._given_away else "there is no such link"
            if not self._acceptor.admit(self, hello):
                logger.warning("link from %s refused: not in the plan", hello.worker)
                return "not in the plan"
            self._sock.settimeout(None)
            with self._lock:
                self._joined = []  # before the sender may have others join
            self._sock.sendall(wire.ACCEPTED)
            reader = BufferedReader(socket.SocketIO(self._sock, "r"), READ_AHEAD)
            while True:
                self._acceptor.arrived(self, self._read(reader, hello.lane))
        except wire.WireError as error:
            logger.warning("link from %s closed: %s", self.hello.worker if self.hello else "a stranger", error)
            return said_by(error)
        except OSError as error:
            return said_by(error)

    def _greet(self) -> wire.LinkHello:
        """Authenticate the sender, and return its hello. Raises WireError, OSError."""
        deadline = time.monotonic() + HELLO_SECONDS
        tune(self._sock)
        self._sock.settimeout(HELLO_SECONDS)
        self._sock.sendall(self.nonce)
        length = wire.parse_hello_length(receive(self._sock, wire.HELLO_LENGTH.size, deadline))
        raw = receive(self._sock, length, deadline)
        self.hello = wire.parse_hello(raw, self._secret, self.nonce, self._me)
        self.thread.name = f"bamboo-rx-{self.hello.worker}-{self.hello.lane}"
        return self.hello

    def _read(self, reader: "BufferedReader[socket.SocketIO]", lane: wire.Lane) -> Frame:
        """Read the next frame. Raises WireError, OSError."""
        header = wire.parse_header(read(reader, wire.HEADER.size))
        if wire.lane_of(header.address) is not lane:
            raise wire.WireError(f"{header.address.kind.name} on the {lane} lane")
        specs, payload = wire.parse_meta(read(reader, header.meta_length), header.body_length)
        try:
            tensors = tuple([self._buffer(spec.shape, spec.dtype) for spec in specs])
        except RuntimeError as error:  # torch's error when memory is exhausted
            raise wire.WireError(f"no room for {header.body_length} bytes") from error
        if header.striped:
            count = read(reader, 1)[0]
            with self._lock:
                flows = [self._sock, *(self._joined or ())][:count]
            if not 0 < count == len(flows):
                raise wire.WireError(f"a body on {count} connections, of which {len(flows)} are here")
            receive_body(list(map(byte_view, tensors)), flows, reader)
        else:
            for tensor in tensors:
                read_into(reader, byte_view(tensor))
        address, epoch, origin = header.address, header.epoch, header.origin
        return Frame(address=address, epoch=epoch, origin=origin, tensors=tensors, payload=payload)
