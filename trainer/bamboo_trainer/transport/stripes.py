"""Large frames whose body is spread over a link's connections ("flows"), because clouds limit the rate of one.

Every frame's header and meta, and small frames whole, travel on the link's first flow. The body of a large one follows
in chunks of a fixed size, each on whichever flow has room first, so that a slow flow carries less. A chunk is a record,
`number, index`, and its bytes: number counts the striped bodies of this link from 0, and the chunk begins at byte index
* CHUNK. On the first flow END ends its share of the body. On the others a chunk of the next body may follow at once,
and LEAVES announces that the flow ends without loss.

One thread sends on all flows and one reads from all: copying is not what limits a link on a fast network.
"""

import bisect
import contextlib
import itertools
import logging
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor

from bamboo_trainer.frames.tensors import byte_view
from bamboo_trainer.transport import sockets, wire

logger = logging.getLogger(__name__)

MAX_FLOWS: Final = 16  # of one link
CHUNK: Final = 256 << 10
RECORD: Final = struct.Struct("<QI")
END: Final = (1 << 32) - 1  # in place of an index, like LEAVES
LEAVES: Final = END - 1
AT_MOST: Final = 512  # buffers in one system call, which takes 1024
AGAIN_SECONDS: Final = 30.0  # until flows that could not be opened are tried again


class Slices:
    """Buffers as one range of bytes."""

    def __init__(self, buffers: Sequence[wire.Buffer]) -> None:
        self._views = [memoryview(buffer) for buffer in buffers if len(buffer)]
        self._ends = list(itertools.accumulate(map(len, self._views)))
        self.size = self._ends[-1] if self._ends else 0
        self.chunks = math.ceil(self.size / CHUNK)

    def chunk(self, index: int) -> list[memoryview]:
        """Return the views that together are that chunk. Raises IndexError if the body has no such chunk."""
        if not 0 <= index < self.chunks:
            raise IndexError(index)
        start, stop = index * CHUNK, min((index + 1) * CHUNK, self.size)
        views = []
        for at in range(bisect.bisect_right(self._ends, start), len(self._views)):
            view = self._views[at]
            first = self._ends[at] - len(view)
            if first >= stop:
                break
            views.append(view[max(0, start - first) : stop - first])
        return views


def after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of the views after their first `count` bytes."""
    for at, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[at + 1 :]]
        count -= len(view)
    return []


def leave(flow: socket.socket) -> None:
    """Announce on a further flow that nothing follows. Raises OSError if it cannot be sent at once."""
    flow.send(RECORD.pack(0, LEAVES), socket.MSG_DONTWAIT)


def send_body(
    number: int, body: Sequence[wire.Buffer], flows: Sequence[socket.socket], pace: Callable[[int], None]
) -> None:
    """Send a body over all flows. Raises OSError as soon as one of them is lost, or shut down by another thread.

    flows: the first one blocks, the others do not. pace: called with each chunk's size before the chunk is sent.
    """
    slices = Slices(body)
    indices = iter(range(slices.chunks))
    poller = select.poll()
    for flow in flows:
        poller.register(flow, select.POLLOUT)
    by_number = {flow.fileno(): flow for flow in flows}
    begun: dict[int, list[memoryview]] = {}
    while by_number:
        for fd, _ in poller.poll():
            views = begun.get(fd)
            if not views:
                index = next(indices, None)
                if index is None:
                    poller.unregister(fd)
                    del by_number[fd]
                    continue
                chunk = slices.chunk(index)
                pace(sum(map(len, chunk)))
                views = [memoryview(buffer) for buffer in wire.coalesce([RECORD.pack(number, index), *chunk])]
            try:
                sent = by_number[fd].sendmsg(views[:AT_MOST], (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            begun[fd] = after(views, sent)
    flows[0].sendall(RECORD.pack(number, END))


class FlowSender:
    """Sends the large frames of one link, and owns its further flows, which end with it.

    The link's thread opens those flows for the first large frame, so that a small job needs one connection a link. Only
    that thread uses this, except for `end`.
    """

    def __init__(
        self, link: str, further: int, join: Callable[[socket.socket, Any], None], pace: Callable[[int], None]
    ) -> None:
        """link: its name, for the log. further: the most flows in addition to the first. join: connects a socket to the
        peer's address and has it join the link; raises OSError, WireError. pace: see `send_body`.
        """
        self._link, self._further, self._join, self._pace = link, further, join, pace
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._bodies = 0  # sent so far
        self._again_at = 0.0  # when missing ones may be tried again
        self._ended = False

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """The open further flows."""
        return tuple(self._sockets)

    def send(self, sock: socket.socket, frame: wire.Encoded) -> None:
        """Send a large frame: its head on the first flow, its body on all. Raises OSError once the link has ended."""
        self._open_missing(sock)  # before the head, at which the receiver looks for joined flows
        head, *body = frame.buffers
        sock.sendall(head)
        send_body(self._bodies, body, [sock, *self.sockets], self._pace)
        self._bodies += 1

    def _open_missing(self, first: socket.socket) -> None:
        """Open missing flows to the first one's peer; the link works without. Raises OSError if it has ended."""
        if len(self._sockets) >= self._further or time.monotonic() < self._again_at:
            return
        try:
            while len(self._sockets) < self._further:
                self._open_one(first)
        except (OSError, wire.WireError) as error:
            if self._ended:
                raise
            self._again_at = time.monotonic() + AGAIN_SECONDS
            have, wanted = 1 + len(self._sockets), 1 + self._further
            logger.warning("%s has %d of %d connections: %s", self._link, have, wanted, error)

    def _open_one(self, first: socket.socket) -> None:
        sock = socket.socket(first.family, first.type, first.proto)
        try:
            with self._lock:
                if self._ended:
                    raise ConnectionAbortedError("closed")
                self._sockets.append(sock)  # at once, so that `end` wakes it, too
            self._join(sock, first.getpeername())
            sock.setblocking(False)
        except BaseException:
            with self._lock:
                if sock in self._sockets:
                    self._sockets.remove(sock)
            sock.close()
            raise

    def end(self, *, clean: bool) -> None:
        """Wake the link's thread; never blocks. clean: nothing was being sent, and the receiver is to know."""
        with self._lock:
            self._ended = True
            for sock in self._sockets:
                if clean:
                    with contextlib.suppress(OSError):  # if it fails, the other side counts the end as a loss
                        leave(sock)
                sockets.wake(sock)

    def close(self) -> None:
        """Close the further flows, once the link's thread no longer uses them."""
        with self._lock:
            ended, self._sockets = self._sockets, []
        for sock in ended:
            sock.close()


class FlowReceiver:
    """Receives the bodies of one link's large frames, and owns the flows that join it.

    Only the link's reader uses it, except for `join` and `end`.
    """

    def __init__(self, sock: socket.socket, reader: sockets.SocketReader) -> None:
        """reader: of the link's first flow."""
        self._first = ArrivingFlow(sock, reader)
        self._lock = threading.Lock()
        self._joined: list[ArrivingFlow] | None = []  # None once the link has ended
        self._bodies = 0  # received so far

    @property
    def joined(self) -> tuple[socket.socket, ...]:
        """The further flows."""
        return tuple(flow.sock for flow in self._joined or ())

    def receive_into(self, tensors: Sequence[Tensor]) -> None:
        """Fill contiguous tensors, one after the other. Raises OSError, WireError."""
        with self._lock:
            flows = [self._first, *(self._joined or ())]
        receive_body(ArrivingBody(self._bodies, list(map(byte_view, tensors))), flows)
        self._bodies += 1

    def join(self, sock: socket.socket) -> bool:
        """Let a proven connection carry a share of the bodies; False if it may not. Raises OSError.

        Its sender is told before it can send on it, so a body is read from all flows that carry it.
        """
        with self._lock:
            if self._joined is None or len(self._joined) >= MAX_FLOWS - 1:
                return False
            sock.setblocking(False)
            sock.sendall(wire.ACCEPTED)
            self._joined.append(ArrivingFlow(sock))
            return True

    def end(self) -> None:
        """Wake the reader, which then finds the flows lost; never blocks."""
        with self._lock:
            for flow in self._joined or ():
                sockets.wake(flow.sock)

    def close(self) -> None:
        """Close the joined flows, and let no more join."""
        with self._lock:
            ended, self._joined = self._joined or [], None
        for flow in ended:
            flow.sock.close()


class ArrivingBody:
    """A body with chunks still to come, and the memory for them."""

    def __init__(self, number: int, buffers: Sequence[memoryview]) -> None:
        self.number = number
        self._slices = Slices(buffers)
        self._seen = bytearray(self._slices.chunks)
        self._missing = self._slices.size  # bytes

    @property
    def complete(self) -> bool:
        return not self._missing

    def claim(self, index: int) -> list[memoryview]:
        """Return the memory for a chunk. Raises WireError if the body has no such chunk, or it came before."""
        try:
            views = self._slices.chunk(index)
        except IndexError:
            raise wire.WireError(f"chunk {index} of a body of {self._slices.chunks}") from None
        if self._seen[index]:
            raise wire.WireError(f"chunk {index} for a second time")
        self._seen[index] = True
        return views

    def arrived(self, count: int) -> None:
        """Count bytes of claimed chunks as arrived."""
        self._missing -= count


class ArrivingFlow:
    """The reader's side of one flow. It outlives a body: its current record may belong to the next one."""

    def __init__(self, sock: socket.socket, first: sockets.SocketReader | None = None) -> None:
        """first: reads the link's first flow, and may already hold some of the body."""
        self.sock = sock
        self._first = first
        self._record = bytearray(RECORD.size)
        self._views = [memoryview(self._record)]  # where its next bytes go; empty: a record has arrived
        self._in_chunk = False

    def take(self, body: ArrivingBody) -> bool:
        """Take in available bytes, without waiting; return False if this flow carries no more of this body.

        Raises WireError; OSError if the flow is lost.
        """
        while self._views or self._obey(body):
            try:
                count = self._receive(self._views[:AT_MOST])
            except BlockingIOError:
                return True
            if not count:
                raise ConnectionResetError("a connection of it was closed by the peer")
            self._views = after(self._views, count)
            if self._in_chunk:
                body.arrived(count)
                if not self._views:
                    self._await_record()
                if not self._read_ahead:
                    return True
        return False

    @property
    def _read_ahead(self) -> bool:
        return self._first is not None and self._first.holds_some

    def _receive(self, views: list[memoryview]) -> int:
        if self._first is not None:
            return self._first.take(views)
        return self.sock.recvmsg_into(views, 0, socket.MSG_DONTWAIT)[0]

    def _await_record(self) -> None:
        self._views, self._in_chunk = [memoryview(self._record)], False

    def _obey(self, body: ArrivingBody) -> bool:
        """Act on the record, and return True if a chunk of this body follows. A record of the next body stays."""
        number, index = RECORD.unpack(self._record)
        if index == LEAVES and self._first is None:
            return False
        if number == body.number + 1 and index != END and self._first is None:
            return False
        if number != body.number or (index == END and self._first is None):
            raise wire.WireError(f"chunk {index} of body {number} within body {body.number}")
        if index == END:
            self._await_record()
            return False
        self._views, self._in_chunk = body.claim(index), True
        return True


def receive_body(body: ArrivingBody, flows: Sequence[ArrivingFlow]) -> None:
    """Wait until the body is complete and the first flow is past it. Raises WireError; OSError if a flow is lost.

    Ends soon when another thread shuts the flows down.
    """
    first = flows[0].sock.fileno()
    poller = select.poll()
    for flow in flows:
        poller.register(flow.sock, select.POLLIN)
    reading = {flow.sock.fileno(): flow for flow in flows}
    ready = list(reading)  # all at first: bytes read ahead, or too early for the body before
    while True:
        for fd in ready:
            if not reading[fd].take(body):
                poller.unregister(fd)
                del reading[fd]
        if body.complete and first not in reading:
            return
        if not reading:
            raise wire.WireError(f"body {body.number} ends before it is complete")
        ready = [fd for fd, _ in poller.poll()]
