"""Socket functions that both ends of a link use."""

import contextlib
import socket
import time


def tune(sock: socket.socket) -> None:
    """Send small frames without delay, and detect a vanished node by keepalive even on an idle link."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def wake(sock: socket.socket) -> None:
    """Shut a socket down, so that threads blocked in it return; only its own thread closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def receive_into(sock: socket.socket, view: memoryview, deadline: float | None = None) -> None:
    """Fill the view. Raises ConnectionError if the link ends first, TimeoutError past the (monotonic) deadline."""
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
    """Return the next bytes from a socket in a new buffer; see `receive_into`."""
    buffer = bytearray(size)
    receive_into(sock, memoryview(buffer), deadline)
    return buffer


def after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of the views after their first `count` bytes."""
    for at, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[at + 1 :]]
        count -= len(view)
    return []


class SocketReader:
    """Reads ahead, so that a small frame takes one system call; reads large parts straight into place."""

    def __init__(self, sock: socket.socket, size: int = 64 << 10) -> None:
        self._sock = sock
        self._ahead = memoryview(bytearray(size))
        self._start = self._end = 0  # of the bytes read ahead and not taken

    def receive_into(self, view: memoryview) -> None:
        """Fill the view, like the module's `receive_into`, without a deadline."""
        while len(view):
            if self._start == self._end:
                if len(view) >= len(self._ahead):
                    receive_into(self._sock, view)
                    return
                self._start, self._end = 0, self._sock.recv_into(self._ahead)
                if not self._end:
                    raise ConnectionResetError("closed by the peer")
            count = min(len(view), self._end - self._start)
            view[:count] = self._ahead[self._start : self._start + count]
            self._start += count
            view = view[count:]

    def fill(self, views: list[memoryview]) -> list[memoryview]:
        """Fill the views with the bytes that were read ahead; return what is left of the views."""
        while views and self._start < self._end:
            count = min(len(views[0]), self._end - self._start)
            views[0][:count] = self._ahead[self._start : self._start + count]
            self._start += count
            views = after(views, count)
        return views

    def receive(self, size: int) -> bytearray:
        """Return the next bytes in a new buffer; see `receive_into`."""
        end = self._start + size
        if end <= self._end:  # true of all but the first bytes of a small frame
            taken, self._start = bytearray(self._ahead[self._start : end]), end
            return taken
        buffer = bytearray(size)
        self.receive_into(memoryview(buffer))
        return buffer
