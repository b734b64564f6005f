"""Strangers at a transport's port."""

import socket


def refused(sock: socket.socket, last: bytes | bytearray = b"") -> bool:
    """The other side closes without a word; it may do so while it is still being told the last ones."""
    sock.settimeout(8)
    try:
        if last:
            sock.sendall(last)
            sock.shutdown(socket.SHUT_WR)
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True
