"""A link's two ends: threads that connect and send, and threads that authenticate the sender and read into tensors.

A frame whose tensors have LARGE_BODY bytes or more travels over any free one of FLOWS_PER_LINK additional connections,
since clouds limit the rate of each connection. All other frames travel over the link's first connection. A number
precedes each frame, and the receiving end delivers the frames of all connections in the order of these numbers. If one
connection is lost, the whole link ends.

The sending end (`Outbound`): the link's thread forms the link, waits for its end, and forms it again; each connection
has a thread that sends. While no frame waits, the caller's own thread sends as much of a small frame as the kernel
takes at once: waking a sender, which then waits for the interpreter's lock, takes longer than sending such a frame.

The receiving end (`Inbound`): each connection has a thread that authenticates the sender, reads whole frames, and
delivers frames as soon as all earlier ones are delivered.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from io import BufferedReader
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from bamboo_core.complaints import said_by
from bamboo_core.names import FLOWS_PER_LINK, LARGE_BODY
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
    """Shut a socket down, so that threads blocked in it return; its owner closes it later."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def receive(sock: socket.socket, size: int, deadline: float) -> bytearray:
    """Return the next `size` bytes from a socket. Raises ConnectionError if the peer closes it first, TimeoutError past
    the (monotonic) deadline.
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


READ_AHEAD: Final = 64 << 10  # bytes, so that a small frame takes one system call


def read(reader: "BufferedReader[socket.SocketIO]", size: int) -> bytes:
    """Return the next `size` bytes from a connection. Raises OSError if the connection ends first."""
    data = reader.read(size)
    if len(data) < size:
        raise ConnectionResetError("closed by the peer")
    return data


class LinkStates:
    """The broken links of one direction. Once one lane's break is reported for a peer, breaks of the peer's other lanes
    are not, until a lane recovers. Each broken lane's recovery is reported, as the lane may have dropped frames resent
    after another lane's recovery.
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


logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
ACCEPT_SECONDS = 10.0  # longer than an acceptor may wait for the plan that names this worker
BACKOFF_SECONDS = (0.05, 1.0)
AT_ONCE = 64 << 10  # bytes that the caller itself may send
PIECE: Final = 256 << 10  # bytes sent at once over a link with a limited rate

Report = Callable[["Outbound"], None]
Queue = SimpleQueue[list[wire.Buffer] | None]  # of frames or their unsent bytes; None wakes a sender at the link's end


class Outbound:
    """The sending end of a link, for one lane's frames to one peer. Its thread calls on_stands when the link is formed,
    and on_broke when it breaks or cannot be formed, unless `close` was called. It calls them without holding the lock.
    """

    def __init__(
        self,
        route: tuple[WorkerId, WorkerId, wire.Lane],
        secret: bytes,
        address: tuple[str, int],
        on_broke: Report,
        on_stands: Report,
        rate: float | None,
    ) -> None:
        """Create the sending end. route: this worker, peer, lane. rate: limit in bytes/s for queued frames, or None."""
        self.me, self.peer, self.lane = route
        self._secret = secret
        self._address = address
        self._on_broke = on_broke
        self._on_stands = on_stands
        self._rate = rate
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._broken = False  # if True, `send` drops frames
        self._attempts = 0  # to connect; if the host has several addresses, each is tried in turn
        self._due = 0.0  # when the rate allows more
        # Of the link since it was last broken:
        self._small, self._large = Queue(), Queue()
        self._pending = 0  # frames queued or being sent
        self._number = 0  # of the next frame
        self._nonce = b""  # the acceptor's nonce of the first connection
        self._socks: list[socket.socket] = []  # the first connection, then those for large frames
        self._senders: list[threading.Thread] = []
        self._end = ""  # why it ended
        self.thread = self._thread("tx", self._run)

    def _thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=target, name=f"bamboo-{name}-{self.peer}-{self.lane}", daemon=True)

    def send(self, frame: wire.Encoded) -> None:
        """Queue a frame. If none waits, send a small one at once, as far as possible. Drop it if the link is down."""
        with self._lock:
            if self._closed or self._broken:
                logger.debug("frame to %s dropped: its %s link is down", self.peer, self.lane)
                return
            buffers = [wire.NUMBER.pack(self._number), *frame.buffers]
            self._number += 1
            if frame.size <= AT_ONCE and self._senders and not self._pending:
                buffers = self._send_at_once(b"".join(buffers))
                if not buffers:
                    return
            self._pending += 1
            if frame.body_length < LARGE_BODY:
                self._small.put(buffers)
            else:
                self._large.put(buffers)
                self._spread_out()

    def _send_at_once(self, data: bytes) -> list[wire.Buffer]:
        """Send as much of a small frame as the kernel takes at once; return the rest. The caller holds the lock."""
        try:
            count = self._socks[0].send(data, socket.MSG_DONTWAIT)
        except OSError:
            count = 0  # if the link has ended, its own threads report it
        return [memoryview(data)[count:]] if count < len(data) else []

    @property
    def is_sending(self) -> bool:
        """Whether a frame is queued or being sent."""
        return self._pending > 0

    def flush(self, seconds: float) -> bool:
        """Wait up to `seconds` until each queued frame is sent, or lost with the link; return False if any is left."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, max(0.0, seconds))

    def close(self) -> None:
        """Drop queued frames and end the link's threads soon; never blocks."""
        with self._lock:
            self._closed = True
            self._finish("closed")

    def _finish(self, why: str) -> None:
        """End the link: wake all threads that wait for it. Never blocks."""
        with self._lock:
            self._end = self._end or why
            self._pending = 0
            for sock in self._socks:
                wake(sock)
            for _ in self._senders:
                self._small.put(None)
                self._large.put(None)
            self._changed.notify_all()

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
        """Mark the link as broken and drop queued frames. Return False if it is closed."""
        with self._lock:
            self._broken = True
            self._small, self._large = Queue(), Queue()
            self._pending = self._number = 0
            self._socks, self._senders, self._end = [], [], ""
            self._changed.notify_all()
            return not self._closed

    def _link(self) -> None:
        """Form the link, wait for its end, and raise the cause: OSError, WireError, ValueError or OverflowError."""
        host, port = self._address
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[self._attempts % len(addresses)]
        self._attempts += 1
        with socket.socket(family, kind, protocol) as sock:
            try:
                self._nonce = self._greet(sock, address)
                with self._lock:
                    self._broken = False
                self._on_stands(self)
                with self._lock:
                    self._start_sender(partial(self._send_all, self._small, self._socks[0]))
                    if not self._large.empty():
                        self._spread_out()
                sock.recv(1)  # returns at the end: after the handshake the acceptor sends nothing
                raise ConnectionResetError(self._end or "closed by the peer")
            finally:
                self._finish("closed by the peer")
                for sender in self._senders:
                    sender.join()

    def _start_sender(self, target: Callable[[], None]) -> None:
        """Start a thread that sends, unless the link has ended. The caller holds the lock."""
        if not self._end:
            self._senders.append(self._thread("send", target))
            self._senders[-1].start()

    def _spread_out(self) -> None:
        """Start the threads that open connections for large frames, if the link is formed and they are not started yet.
        The caller holds the lock.
        """
        if len(self._senders) == 1:
            for _ in range(FLOWS_PER_LINK):
                self._start_sender(self._send_large)

    def _greet(self, sock: socket.socket, address: Any, joins: bytes = b"") -> bytes:
        """Connect and authenticate; return the acceptor's nonce. joins: see LinkHello. Raises OSError, WireError."""
        with self._lock:
            if self._end or self._closed:
                raise ConnectionAbortedError(self._end or "closed")
            self._socks.append(sock)
        sock.settimeout(CONNECT_SECONDS)
        sock.connect(address)
        tune(sock)
        nonce = bytes(receive(sock, wire.NONCE_SIZE, time.monotonic() + CONNECT_SECONDS))
        sock.sendall(wire.encode_hello(self._secret, nonce, self.me, self.peer, self.lane, joins))
        if receive(sock, 1, time.monotonic() + ACCEPT_SECONDS) != wire.ACCEPTED:
            raise wire.WireError("not accepted")
        sock.settimeout(None)
        return nonce

    def _send_large(self) -> None:
        """Open a connection that joins the link, and send large frames over it until the link ends."""
        first = self._socks[0]
        try:
            with socket.socket(first.family, first.type, first.proto) as sock:
                self._greet(sock, first.getpeername(), self._nonce)
                self._send_all(self._large, sock)
        except (OSError, wire.WireError) as error:
            self._finish(said_by(error))

    def _send_all(self, queue: Queue, sock: socket.socket) -> None:
        """Send a queue's frames over a connection until the link ends. An error of the connection ends the link."""
        try:
            while not self._end and (buffers := queue.get()):
                size, count = sum(map(len, buffers)), 1
                with contextlib.suppress(Empty):  # another sender of large frames may take the next one first
                    while size < wire.COALESCE and (more := queue.get_nowait()):
                        buffers += more
                        size += sum(map(len, more))
                        count += 1
                for buffer in wire.coalesce(buffers):
                    self._send_paced(sock, memoryview(buffer))
                with self._changed:
                    if not self._end:
                        self._pending -= count
                        self._changed.notify_all()
        except OSError as error:
            self._finish(said_by(error))

    def _send_paced(self, sock: socket.socket, buffer: memoryview) -> None:
        """Send bytes, no faster than the link's rate. Raises OSError, also if the link ends meanwhile."""
        if self._rate is None:
            sock.sendall(buffer)
            return
        for at in range(0, len(buffer), PIECE):
            piece = buffer[at : at + PIECE]
            with self._changed:
                begin = max(self._due, time.monotonic())
                self._due = begin + len(piece) / self._rate
                if self._changed.wait_for(lambda: self._end, begin - time.monotonic()):
                    raise ConnectionAbortedError(self._end)
            sock.sendall(piece)


HELLO_SECONDS = 5.0


class Inbound:
    """The receiving end of one connection. A link's first one orders and delivers the frames of all its connections."""

    def __init__(
        self, sock: socket.socket, me: WorkerId, secret: bytes, acceptor: "TcpTransport", buffer: Buffer
    ) -> None:
        """Create the receiving end. acceptor: called on the connections' threads. buffer: allocates tensors' memory."""
        self._sock = sock
        self._me = me
        self._secret = secret
        self._acceptor = acceptor
        self._buffer = buffer
        self._link = self  # its first connection
        self.nonce = os.urandom(wire.NONCE_SIZE)
        self.hello: wire.LinkHello | None = None  # set once it is proven
        self.thread = threading.Thread(target=self._run, name="bamboo-rx", daemon=True)
        # Of a first connection:
        self._lock = threading.Lock()
        self._joined: list[Inbound] = []
        self._ended = False  # nothing joins it any more
        self._turn = threading.Lock()  # held while a frame is delivered
        self._next = 0  # the number of the next frame
        self._early: dict[int, Frame] = {}  # frames that wait for earlier ones, by number

    def close(self) -> None:
        """Make the thread end soon, and the threads of the connections that joined this one. Never blocks."""
        with self._lock:
            self._ended = True
            for each in (self, *self._joined):
                wake(each._sock)

    def _take_in(self, other: "Inbound") -> bool:
        """Let an authenticated connection join this link. Return False if the link is full or has ended."""
        with self._lock:
            if self._ended or len(self._joined) >= FLOWS_PER_LINK:
                return False
            self._joined.append(other)
            return True

    def _deliver(self, number: int, frame: Frame) -> None:
        """Deliver a frame once all earlier ones are delivered; keep it until then. Raises WireError for a repeat."""
        with self._turn:
            if number < self._next or number in self._early:
                raise wire.WireError(f"a second frame with the number {number}")
            self._early[number] = frame
            while self._next in self._early:
                self._acceptor.arrived(self, self._early.pop(self._next))
                self._next += 1

    def _run(self) -> None:
        reason, whole = "ended by an error", False
        try:
            reason, whole = self._serve(), True
        except wire.WireError as error:
            logger.warning("link from %s closed: %s", self.hello.worker if self.hello else "a stranger", error)
            reason = said_by(error)
        except OSError as error:
            reason = said_by(error)
        finally:
            if not whole:
                self._link.close()
            with self._lock:
                self._ended = True
            with contextlib.suppress(OSError):
                self._link._sock.shutdown(socket.SHUT_WR)  # so that the sender ends the whole link
            for other in self._joined:
                other.thread.join()
            self._sock.close()
            self._acceptor.left(self, reason)

    def _serve(self) -> str:
        """Authenticate the sender and deliver its frames. Return why the connection was refused, or ended between two
        frames. Raises WireError, OSError.
        """
        hello = self._greet()
        if hello.joins:
            link = self._acceptor.find(hello)
            if link is None or not link._take_in(self):
                return "there is no such link"
            self._link = link
        elif not self._acceptor.admit(self, hello):
            logger.warning("link from %s refused: not in the plan", hello.worker)
            return "not in the plan"
        self._sock.settimeout(None)
        self._sock.sendall(wire.ACCEPTED)
        reader = BufferedReader(socket.SocketIO(self._sock, "r"), READ_AHEAD)
        while front := reader.read(wire.NUMBER.size + wire.HEADER.size):
            frame = self._read(front[wire.NUMBER.size :], reader, hello.lane)
            (number,) = wire.NUMBER.unpack_from(front)
            self._link._deliver(number, frame)
        return "closed by the peer"

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

    def _read(self, raw: bytes, reader: "BufferedReader[socket.SocketIO]", lane: wire.Lane) -> Frame:
        """Read the rest of a frame. raw: its header. Raises WireError, OSError."""
        header = wire.parse_header(raw)
        if wire.lane_of(header.address) is not lane:
            raise wire.WireError(f"{header.address.kind.name} on the {lane} lane")
        specs, payload = wire.parse_meta(read(reader, header.meta_length), header.body_length)
        try:
            tensors = tuple([self._buffer(spec.shape, spec.dtype) for spec in specs])
        except RuntimeError as error:  # torch's error when memory is exhausted
            raise wire.WireError(f"no room for {header.body_length} bytes") from error
        for tensor in tensors:
            if reader.readinto(view := byte_view(tensor)) < len(view):
                raise ConnectionResetError("closed by the peer")
        address, epoch, origin = header.address, header.epoch, header.origin
        return Frame(address=address, epoch=epoch, origin=origin, tensors=tensors, payload=payload)
