"""What both ends of a link do with their sockets."""

import contextlib
import socket
import time


def tune(sock: socket.socket) -> None:
    """No delay for small frames; a node that vanished is noticed by keepalive even on an idle link."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def wake(sock: socket.socket) -> None:
    """Shut it down, so that threads blocked in it return; only its own thread closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def receive_into(sock: socket.socket, view: memoryview, deadline: float | None = None) -> None:
    """Fill the view. ConnectionError if the link ends first, TimeoutError past the (monotonic) deadline."""
    while len(view):
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the peer is too slow")
            sock.settimeout(left)
        count = sock.recv_into(view)
        if not count:
            raise ConnectionResetError("closed by the peer")
        view = view[count:]


def receive(sock: socket.socket, size: int, deadline: float | None = None) -> bytearray:
    """As receive_into, into a new buffer."""
    buffer = bytearray(size)
    receive_into(sock, memoryview(buffer), deadline)
    return buffer
