"""How the bodies of large frames travel: over several connections of a link (`stripes`), or by one-sided writes
(`one_sided`), which `nixl` makes.

A link's own connection keeps what has to be small, ordered and authenticated: the handshake, each frame's header and
meta, small frames whole, and the end of the link.
"""

import socket
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bamboo_core.planning.plan import WorkerId
from bamboo_trainer.transport import wire
from bamboo_trainer.transport.sockets import SocketReader


class TransportUnavailable(ValueError):
    """The manifest asks for a transport that this machine does not have. The message names the field."""


class SendingLink(Protocol):
    """The sending end of a link, as the way for its bodies sees it."""

    peer: WorkerId
    lane: wire.Lane

    def join(self, sock: socket.socket, address: Any) -> None:
        """Connect a socket to the peer's address and have it join the link. Raises OSError, WireError."""
        ...

    def pace(self, size: int) -> None:
        """Wait until the link's rate allows so many bytes more. OSError if the link ends meanwhile."""
        ...


class BodySender(Protocol):
    """Belongs to one connection of a link. Used by the thread that sends over it, but for `listen` and `end`."""

    def listen(self, sock: socket.socket) -> None:
        """Takes in what the receiver says, in a thread of its own, until the connection ends. Raises OSError,
        WireError.
        """
        ...

    def send(self, sock: socket.socket, frame: wire.Encoded) -> None:
        """A large frame: its head on the connection, its body as this sends bodies. OSError once the link ended."""
        ...

    def settle(self) -> None:
        """Wait until closing the connection loses nothing of what was sent."""
        ...

    def end(self, *, clean: bool) -> None:
        """The link ends: release who waits for its sending. Never blocks. clean: nothing was being sent."""
        ...

    def close(self) -> None:
        """Give up what is under way. Returns at once; nothing touches the bodies' memory afterwards."""
        ...


class BodyReceiver(Protocol):
    """Belongs to one connection of a link. Used by its reader's thread, but for `join` and `end`."""

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """A tensor without values where a body's is best received; None if that is anywhere in host memory."""
        ...

    def receive_into(self, tensors: Sequence[Tensor]) -> torch.cuda.Event | None:
        """Fill contiguous tensors, one after the other. What is put into a GPU's memory is there after the event that
        is returned. Raises OSError, WireError.
        """
        ...

    def join(self, sock: socket.socket) -> bool:
        """Have a proven connection carry a share of the bodies, and tell its sender; False if it may not.

        OSError if it cannot be told.
        """
        ...

    def end(self) -> None:
        """The link ends: release who waits for a body. Never blocks."""
        ...

    def close(self) -> None:
        """Releases what the connection's receiver holds."""
        ...


class BodyChannel(Protocol):
    """Makes both ends, one for each connection. takes_bodies: large bodies leave the frames that they belong to."""

    takes_bodies: bool

    def reads_devices(self, lane: wire.Lane) -> bool:
        """Are large bodies of that lane sent from where they are, be it in a GPU's memory?"""
        ...

    def sender(self, link: SendingLink, rate: float | None) -> BodySender:
        """rate: bytes a second at most."""
        ...

    def receiver(
        self, sender: WorkerId, lane: wire.Lane, sock: socket.socket, reader: SocketReader
    ) -> BodyReceiver: ...
