"""The receiving end of a link: a reader thread that checks who is there, then reads straight into tensors."""

import logging
import os
import socket
import threading
import time
from typing import Protocol

import torch

from bamboo.planning.plan import WorkerId
from bamboo_trainer.transport import sockets, wire
from bamboo_trainer.transport.frames import Frame

logger = logging.getLogger(__name__)

HELLO_SECONDS = 5.0


class Acceptor(Protocol):
    """What a reader needs from the transport. Called by the reader's thread."""

    def admit(self, link: "Inbound", hello: wire.LinkHello) -> bool:
        """May it deliver? May wait for the plan that says so."""
        ...

    def arrived(self, link: "Inbound", frame: Frame) -> None: ...

    def left(self, link: "Inbound", reason: str) -> None:
        """The link has ended; called once, whether it was admitted or not."""
        ...


class Inbound:
    """An accepted connection."""

    def __init__(self, sock: socket.socket, me: WorkerId, secret: bytes, acceptor: Acceptor) -> None:
        self._sock = sock
        self._me = me
        self._secret = secret
        self._acceptor = acceptor
        self.hello: wire.LinkHello | None = None  # set once it is proven
        self.thread = threading.Thread(target=self._run, name="bamboo-rx", daemon=True)

    def close(self) -> None:
        """End the thread soon; never blocks."""
        sockets.wake(self._sock)

    def _run(self) -> None:
        reason = "ended by an error"
        try:
            with self._sock:
                reason = self._serve()
        finally:
            self._acceptor.left(self, reason)

    def _serve(self) -> str:
        """Read until the link ends; why it did."""
        try:
            hello = self._greet()
            if not self._acceptor.admit(self, hello):
                logger.warning("link from %s refused: not in the plan", hello.worker)
                return "not in the plan"
            self._sock.settimeout(None)
            self._sock.sendall(wire.ACCEPTED)
            reader = sockets.SocketReader(self._sock)
            while True:
                self._acceptor.arrived(self, _read(reader, hello.lane))
        except wire.WireError as error:
            logger.warning("link from %s closed: %s", self.hello.worker if self.hello else "a stranger", error)
            return str(error)
        except OSError as error:
            return str(error)

    def _greet(self) -> wire.LinkHello:
        """Raises WireError, OSError."""
        deadline = time.monotonic() + HELLO_SECONDS
        sockets.tune(self._sock)
        nonce = os.urandom(wire.NONCE_SIZE)
        self._sock.settimeout(HELLO_SECONDS)
        self._sock.sendall(nonce)
        length = wire.parse_hello_length(sockets.receive(self._sock, wire.HELLO_LENGTH.size, deadline))
        raw = sockets.receive(self._sock, length, deadline)
        self.hello = wire.parse_hello(raw, self._secret, nonce, self._me)
        self.thread.name = f"bamboo-rx-{self.hello.worker}-{self.hello.lane}"
        return self.hello


def _read(reader: sockets.SocketReader, lane: wire.Lane) -> Frame:
    """Raises WireError, OSError."""
    header = wire.parse_header(reader.receive(wire.HEADER.size))
    if wire.lane_of(header.address.kind) is not lane:
        raise wire.WireError(f"{header.address.kind.name} on the {lane} lane")
    specs, payload = wire.parse_meta(reader.receive(header.meta_length), header.body_length)
    try:
        tensors = tuple(torch.empty(spec.shape, dtype=spec.dtype) for spec in specs)
    except RuntimeError as error:  # how torch says that memory is out
        raise wire.WireError(f"no room for {header.body_length} bytes") from error
    for tensor in tensors:
        reader.receive_into(wire.byte_view(tensor))
    return Frame(address=header.address, epoch=header.epoch, origin=header.origin, tensors=tensors, payload=payload)
