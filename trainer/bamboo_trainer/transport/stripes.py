"""Large bodies, spread over a link's connections ("flows"), because clouds limit the rate of one.

Every frame's header and meta, and small frames whole, travel on the link's first flow. The body of a large one is cut
into equal parts, one for each flow. One thread sends on all flows and one reads from all: copying is not what limits a
link on a fast network.
"""

import select
import socket
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from bamboo_trainer.transport import sockets, wire

MAX_FLOWS: Final = 16  # of one link
PIECE: Final = 256 << 10  # bytes sent between two checks of the rate


def parts_of(body: Sequence[wire.Buffer], count: int) -> list[list[memoryview]]:
    """Cut buffers, as one range of bytes, into that number of equal parts."""
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


def receive_body(body: Sequence[memoryview], flows: Sequence[socket.socket], first: sockets.SocketReader) -> None:
    """Fill a body from all flows. Raises OSError if one of them is lost, or shut down by another thread.

    first: reads the first flow, and may already hold some of its part.
    """
    parts = parts_of(body, len(flows))
    parts[0] = first.fill(parts[0])
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
            left[fd] = flow, sockets.after(views, count)
            if not left[fd][1]:
                poller.unregister(fd)
                del left[fd]
