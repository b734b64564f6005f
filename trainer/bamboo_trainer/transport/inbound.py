"""The receiving end of a link: a reader thread that authenticates the sender, then reads straight into tensors.

A connection that joins a link passes to that link's reader once its sender is proven, and its own thread ends.
"""

import logging
import os
import socket
import threading
import time
from typing import Protocol

from bamboo_core.complaints import said_by
from bamboo_core.planning.plan import WorkerId
from bamboo_trainer.frames.frame import Frame
from bamboo_trainer.frames.tensors import byte_view
from bamboo_trainer.transport import sockets, stripes, wire
from bamboo_trainer.transport.base import Buffer

logger = logging.getLogger(__name__)

HELLO_SECONDS = 5.0


class Acceptor(Protocol):
    """What a reader needs from the transport. Called on the reader's thread."""

    def admit(self, link: "Inbound", hello: wire.LinkHello) -> bool:
        """Return whether the link may deliver frames; may wait for the plan that names its sender."""
        ...

    def join(self, sock: socket.socket, hello: wire.LinkHello) -> bool:
        """Pass a connection to the link that it joins; False if that link is gone."""
        ...

    def arrived(self, link: "Inbound", frame: Frame) -> None: ...

    def left(self, link: "Inbound", reason: str) -> None:
        """Take note that the link has ended; called once, admitted or not."""
        ...


class Inbound:
    """An accepted connection, and those that have joined it."""

    def __init__(
        self,
        sock: socket.socket,
        me: WorkerId,
        secret: bytes,
        acceptor: Acceptor,
        buffer: Buffer,
    ) -> None:
        """buffer: allocates the memory that tensors are read into."""
        self._sock = sock
        self._me = me
        self._secret = secret
        self._acceptor = acceptor
        self._buffer = buffer
        self._joined: list[socket.socket] | None = None  # for parts of large bodies, while the link is admitted
        self.nonce = os.urandom(wire.NONCE_SIZE)
        self.hello: wire.LinkHello | None = None  # set once it is proven
        self._lock = threading.Lock()
        self._given_away = False
        self.thread = threading.Thread(target=self._run, name="bamboo-rx", daemon=True)

    def close(self) -> None:
        """End the thread soon; never blocks."""
        with self._lock:
            sockets.wake(self._sock)
            for sock in self._joined or ():
                sockets.wake(sock)

    def take_in(self, sock: socket.socket) -> bool:
        """Let a proven connection join this link, and tell its sender, which then may use it; False if it may not, or
        the link has ended. Raises OSError if its sender cannot be told.
        """
        with self._lock:
            if self._joined is None or len(self._joined) >= stripes.MAX_FLOWS - 1:
                return False
            sock.setblocking(False)
            sock.sendall(wire.ACCEPTED)
            self._joined.append(sock)
            return True

    def _run(self) -> None:
        reason = "ended by an error"
        try:
            reason = self._serve()
        finally:
            with self._lock:
                joined, self._joined = self._joined or [], None
            for sock in joined:
                sock.close()
            if not self._given_away:
                self._sock.close()
            self._acceptor.left(self, reason)

    def _serve(self) -> str:
        """Read until the link ends; return the reason."""
        try:
            hello = self._greet()
            if hello.joins:
                self._given_away = self._acceptor.join(self._sock, hello)
                return "joined another one" if self._given_away else "there is no such link"
            if not self._acceptor.admit(self, hello):
                logger.warning("link from %s refused: not in the plan", hello.worker)
                return "not in the plan"
            self._sock.settimeout(None)
            reader = sockets.SocketReader(self._sock)
            with self._lock:
                self._joined = []  # before the sender may have others join
            self._sock.sendall(wire.ACCEPTED)
            while True:
                self._acceptor.arrived(self, self._read(reader, hello.lane))
        except wire.WireError as error:
            logger.warning("link from %s closed: %s", self.hello.worker if self.hello else "a stranger", error)
            return said_by(error)
        except OSError as error:
            return said_by(error)

    def _greet(self) -> wire.LinkHello:
        """Authenticate the sender, and return its hello. Raises WireError, OSError."""
        deadline = time.monotonic() + HELLO_SECONDS
        sockets.tune(self._sock)
        self._sock.settimeout(HELLO_SECONDS)
        self._sock.sendall(self.nonce)
        length = wire.parse_hello_length(sockets.receive(self._sock, wire.HELLO_LENGTH.size, deadline))
        raw = sockets.receive(self._sock, length, deadline)
        self.hello = wire.parse_hello(raw, self._secret, self.nonce, self._me)
        self.thread.name = f"bamboo-rx-{self.hello.worker}-{self.hello.lane}"
        return self.hello

    def _read(self, reader: sockets.SocketReader, lane: wire.Lane) -> Frame:
        """Read the next frame. Raises WireError, OSError."""
        header = wire.parse_header(reader.receive(wire.HEADER.size))
        if wire.lane_of(header.address) is not lane:
            raise wire.WireError(f"{header.address.kind.name} on the {lane} lane")
        specs, payload = wire.parse_meta(reader.receive(header.meta_length), header.body_length)
        try:
            tensors = tuple([self._buffer(spec.shape, spec.dtype) for spec in specs])
        except RuntimeError as error:  # torch's error when memory is exhausted
            raise wire.WireError(f"no room for {header.body_length} bytes") from error
        if header.striped:
            count = reader.receive(1)[0]
            with self._lock:
                flows = [self._sock, *(self._joined or ())][:count]
            if not 0 < count == len(flows):
                raise wire.WireError(f"a body on {count} connections, of which {len(flows)} are here")
            stripes.receive_body(list(map(byte_view, tensors)), flows, reader)
        else:
            for tensor in tensors:
                reader.receive_into(byte_view(tensor))
        return Frame(
            address=header.address,
            epoch=header.epoch,
            origin=header.origin,
            tensors=tensors,
            payload=payload,
        )
