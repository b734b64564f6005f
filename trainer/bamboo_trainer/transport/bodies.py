"""How the bodies of large frames may travel beside a link's own connection: the seam for other networks.

The connection keeps what has to be small, ordered and authenticated: the handshake, each frame's header and meta, and
the end of the link. Without such a way (`BodyChannel`), bodies travel on the connection, too.
"""

import socket
from collections.abc import Sequence
from typing import Protocol

from bamboo_trainer.transport import wire
from bamboo_trainer.transport.sockets import SocketReader


class TransportUnavailable(ValueError):
    """The manifest asks for a transport that this machine does not have. The message names the field."""


class BodySender(Protocol):
    """Of one connection. Made and used by the thread that sends over it, except for `listen`."""

    def listen(self, sock: socket.socket) -> None:
        """In a thread of its own: take in what the receiver says, until the connection ends. OSError, WireError."""
        ...

    def send(self, sock: socket.socket, body: Sequence[wire.Buffer]) -> None:
        """After the frame's head. Returns when all of it is in the receiver's memory; OSError once the link ended."""
        ...

    def settle(self) -> None:
        """Wait until the receiver has taken in all that was sent, so that closing the connection loses none of it."""
        ...

    def close(self) -> None:
        """Give up what is under way. Returns at once; nothing touches the bodies' memory afterwards."""
        ...


class BodyReceiver(Protocol):
    """Of one connection. Used by its reader's thread."""

    def receive_into(self, views: Sequence[memoryview]) -> None:
        """Fill them, one after the other. Raises OSError, WireError."""
        ...

    def close(self) -> None:
        """As the sender's."""
        ...


class BodyChannel(Protocol):
    """Makes both ends, one for each connection."""

    def sender(self, link: str, rate: float | None) -> BodySender:
        """link: a name for people. rate: bytes a second at most."""
        ...

    def receiver(self, link: str, sock: socket.socket, reader: SocketReader) -> BodyReceiver: ...
