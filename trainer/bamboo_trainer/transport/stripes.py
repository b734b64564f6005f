"""The body of a large frame, spread over the connections ("flows") of a link: a cloud limits what one of them carries.

Every frame's header and meta, and small frames whole, travel on the link's first flow. The body of a large one follows
in chunks of a fixed size, each on whichever flow has room first, so that a slow flow carries less. A chunk is a record,
`number, index`, and its bytes: number counts the striped bodies of this link from 0, and the chunk begins at byte
index * CHUNK. On the first flow END says that its share of the body is over. On the others a chunk of the next body may
follow at once, and LEAVES says that the flow's end is no loss.

One thread sends on all flows and one reads from all: what limits a link on a fast network is not the copying.
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
from typing import Final

import torch
from torch import Tensor

from bamboo_core.planning.plan import WorkerId
from bamboo_trainer.frames.tensors import byte_view
from bamboo_trainer.transport import sockets, wire
from bamboo_trainer.transport.bodies import SendingLink

logger = logging.getLogger(__name__)

MAX_FLOWS: Final = 16  # of one link
CHUNK: Final = 256 << 10
RECORD: Final = struct.Struct("<QI")
END: Final = (1 << 32) - 1  # in place of an index, as is
LEAVES: Final = END - 1
AT_MOST: Final = 512  # buffers in one call of the system, which takes 1024
AGAIN_SECONDS: Final = 30.0  # until flows that could not be opened are tried again


class Slices:
    """Buffers as one range of bytes."""

    def __init__(self, buffers: Sequence[wire.Buffer]) -> None:
        self._views = [memoryview(buffer) for buffer in buffers if len(buffer)]
        self._ends = list(itertools.accumulate(map(len, self._views)))
        self.size = self._ends[-1] if self._ends else 0
        self.chunks = math.ceil(self.size / CHUNK)

    def chunk(self, index: int) -> list[memoryview]:
        """The views that together are that chunk. IndexError if there is none."""
        if not 0 <= index < self.chunks:
            raise IndexError(index)
        start, stop = index * CHUNK, min((index + 1) * CHUNK, self.size)
        found = []
        for at in range(bisect.bisect_right(self._ends, start), len(self._views)):
            view = self._views[at]
            first = self._ends[at] - len(view)
            if first >= stop:
                break
            found.append(view[max(0, start - first) : stop - first])
        return found


def after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of them once their first `count` bytes are done."""
    for at, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[at + 1 :]]
        count -= len(view)
    return []


def leave(flow: socket.socket) -> None:
    """Say on a flow that is not the first one that nothing follows. OSError if it cannot be said at once."""
    flow.send(RECORD.pack(0, LEAVES), socket.MSG_DONTWAIT)


def send_body(
    number: int, body: Sequence[wire.Buffer], flows: Sequence[socket.socket], pace: Callable[[int], None]
) -> None:
    """Send a body over all flows. OSError as soon as one of them is lost, or shut down by another thread.

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


class FlowChannel:
    """See `BodyChannel`. flows: connections that a link may have; with one bodies stay in their frames."""

    def __init__(self, flows: int = 1) -> None:
        self._flows, self.takes_bodies = flows, flows > 1

    def reads_devices(self, lane: wire.Lane) -> bool:
        return False

    def sender(self, link: SendingLink, rate: float | None) -> "FlowSender":
        return FlowSender(link, self._flows - 1)

    def receiver(
        self, sender: WorkerId, lane: wire.Lane, sock: socket.socket, reader: sockets.SocketReader
    ) -> "FlowReceiver":
        return FlowReceiver(sock, reader)


class FlowSender:
    """See `BodySender`. The flows beside a link's first one end with it. They are opened for the first large frame, so
    that small jobs need no more than one connection, by the link's own thread.
    """

    def __init__(self, link: SendingLink, wanted: int) -> None:
        """wanted: as many further flows as there may be."""
        self._link, self._wanted = link, wanted
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._bodies = 0  # sent so far
        self._again_at = 0.0  # when missing ones may be tried again
        self._ended = False

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """The further flows that are open."""
        return tuple(self._sockets)

    def listen(self, sock: socket.socket) -> None:
        """The receiver never speaks: what can be read is the end."""
        sock.recv(1)

    def send(self, sock: socket.socket, frame: wire.Encoded) -> None:
        """See `BodySender`."""
        self._open_missing(sock)  # before the head, with which the receiver looks who has joined
        head, *body = frame.buffers
        sock.sendall(head)
        send_body(self._bodies, body, [sock, *self.sockets], self._link.pace)
        self._bodies += 1

    def settle(self) -> None:
        """What the kernel has is sent before the connection is closed."""

    def _open_missing(self, first: socket.socket) -> None:
        """To the first one's peer. The link serves without them, too, for some time. OSError if it has ended."""
        if len(self._sockets) >= self._wanted or time.monotonic() < self._again_at:
            return
        try:
            while len(self._sockets) < self._wanted:
                self._open_one(first)
        except (OSError, wire.WireError) as error:
            if self._ended:
                raise
            self._again_at = time.monotonic() + AGAIN_SECONDS
            have, wanted = 1 + len(self._sockets), 1 + self._wanted
            name = f"{self._link.lane} link to {self._link.peer}"
            logger.warning("%s has %d of %d connections: %s", name, have, wanted, error)

    def _open_one(self, first: socket.socket) -> None:
        sock = socket.socket(first.family, first.type, first.proto)
        try:
            with self._lock:
                if self._ended:
                    raise ConnectionAbortedError("closed")
                self._sockets.append(sock)  # at once, so that who ends the link wakes it, too
            self._link.join(sock, first.getpeername())
            sock.setblocking(False)
        except BaseException:
            with self._lock:
                if sock in self._sockets:
                    self._sockets.remove(sock)
            sock.close()
            raise

    def end(self, *, clean: bool) -> None:
        """See `BodySender`. If it is clean the receiver is told that nothing follows."""
        with self._lock:
            self._ended = True
            for sock in self._sockets:
                if clean:
                    with contextlib.suppress(OSError):  # then the other side takes the end for a loss
                        leave(sock)
                sockets.wake(sock)

    def close(self) -> None:
        with self._lock:
            ended, self._sockets = self._sockets, []
        for sock in ended:
            sock.close()


class FlowReceiver:
    """See `BodyReceiver`."""

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

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Anywhere in host memory."""

    def receive_into(self, tensors: Sequence[Tensor]) -> None:
        """See `BodyReceiver`."""
        with self._lock:
            flows = [self._first, *(self._joined or ())]
        receive_body(ArrivingBody(self._bodies, list(map(byte_view, tensors))), flows)
        self._bodies += 1

    def join(self, sock: socket.socket) -> bool:
        """See `BodyReceiver`. Its sender hears it before anything can be sent on it, so every body is read from all
        flows that it is sent on.
        """
        with self._lock:
            if self._joined is None or len(self._joined) >= MAX_FLOWS - 1:
                return False
            sock.setblocking(False)
            sock.sendall(wire.ACCEPTED)
            self._joined.append(ArrivingFlow(sock))
            return True

    def end(self) -> None:
        with self._lock:
            for flow in self._joined or ():
                sockets.wake(flow.sock)

    def close(self) -> None:
        with self._lock:
            ended, self._joined = self._joined or [], None
        for flow in ended:
            flow.sock.close()


class ArrivingBody:
    """A body of which chunks are still to come, and where in memory they belong."""

    def __init__(self, number: int, buffers: Sequence[memoryview]) -> None:
        self.number = number
        self._slices = Slices(buffers)
        self._seen = bytearray(self._slices.chunks)
        self._missing = self._slices.size  # bytes

    @property
    def complete(self) -> bool:
        return not self._missing

    def claim(self, index: int) -> list[memoryview]:
        """The memory to which that chunk belongs. Raises WireError if the body has no such chunk, or has it already."""
        try:
            views = self._slices.chunk(index)
        except IndexError:
            raise wire.WireError(f"chunk {index} of a body of {self._slices.chunks}") from None
        if self._seen[index]:
            raise wire.WireError(f"chunk {index} for a second time")
        self._seen[index] = True
        return views

    def arrived(self, count: int) -> None:
        """Counts so many bytes of claimed chunks as arrived."""
        self._missing -= count


class ArrivingFlow:
    """The reader's side of one flow. It outlives a body: the record that it stopped at may be of the next one."""

    def __init__(self, sock: socket.socket, first: sockets.SocketReader | None = None) -> None:
        """first: what reads the link's first flow, and may hold some of the body already."""
        self.sock = sock
        self._first = first
        self._record = bytearray(RECORD.size)
        self._views = [memoryview(self._record)]  # where its next bytes go; none: a record is there
        self._in_chunk = False

    def take(self, body: ArrivingBody) -> bool:
        """Take in some of what has come, without waiting; False if no more of this body comes on this flow.

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
        """What the record says. It stays if it is not for this body."""
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
    ready = list(reading)  # for what was read ahead, or was too early for the body before
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
