"""TCP transports, raw links and frames for tests of the transport."""

import contextlib
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from bamboo_trainer.frames import Address, Frame, FrameKind, byte_view
from bamboo_trainer.transport import links, wire
from bamboo_trainer.transport.base import Event
from bamboo_trainer.transport.tcp import TcpTransport

SECRET = "a secret"
SECONDS = 60.0  # that a test waits for something


@dataclass
class Inbox:
    """A list of received events. `wait` returns the events of a type once the list holds enough of them. then: called
    with each added event.
    """

    events: list[Event] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    then: Callable[[Event], None] = lambda event: None

    def __call__(self, event: Event) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()
        self.then(event)

    def of(self, kind: type) -> list[Any]:
        with self.changed:
            return [event for event in self.events if isinstance(event, kind)]

    def wait(self, kind: type, count: int = 1, seconds: float = SECONDS) -> list[Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.of(kind)) >= count, seconds), self.events
            return self.of(kind)


def make_frame(
    *tensors: torch.Tensor, kind: FrameKind = FrameKind.ACTIVATION, microbatch: int = 0, payload: Any = None
) -> Frame:
    return Frame(address=Address(kind, 1, 2, 3, microbatch, 5), epoch=7, origin=4, tensors=tensors, payload=payload)


def raw_frame(frame: Frame, number: int = 0) -> bytes:
    """Return the bytes in which a link carries a frame."""
    return b"".join([wire.NUMBER.pack(number), *wire.encode_frame(frame).buffers])


def dial(end: TcpTransport, lane: wire.Lane = wire.Lane.BOUNDARY) -> socket.socket:
    """Open a raw link from "a" to "b", and complete the handshake."""
    sock, _, answer = greet(end, lane)
    assert answer == wire.ACCEPTED
    return sock


def greet(
    end: TcpTransport, lane: wire.Lane = wire.Lane.BOUNDARY, joins: bytes = b"", secret: str = SECRET
) -> tuple[socket.socket, bytes, bytes]:
    """Open a raw connection from "a" to "b"; return (socket, acceptor's nonce, its answer). b"" is a refusal."""
    sock = socket.create_connection(("127.0.0.1", end.port), SECONDS)
    nonce = sock.recv(wire.NONCE_SIZE)
    sock.sendall(wire.encode_hello(secret.encode(), nonce, "a", "b", lane, joins))
    return sock, nonce, sock.recv(1)


def same(left: Frame, right: Frame) -> bool:
    """Return whether two frames are bit-equal. They must have the same number of tensors."""
    facts = [(frame.address, frame.epoch, frame.origin, frame.payload) for frame in (left, right)]
    return facts[0] == facts[1] and all(
        a.dtype == b.dtype and a.shape == b.shape and bytes(byte_view(a)) == bytes(byte_view(b))
        for a, b in zip(left.tensors, right.tensors, strict=True)
    )


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("bamboo-")]


def our_sockets() -> dict[str, int]:
    """Return the descriptors of this process's open sockets, by names that no later socket reuses."""
    links = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links[os.readlink(f"/proc/self/fd/{name}")] = int(name)
    return {link: descriptor for link, descriptor in links.items() if link.startswith("socket:")}


def accepted(end: TcpTransport) -> list[socket.socket]:
    """Return duplicates of the connections that an end has accepted; the caller closes them."""
    made = []
    for sock in [socket.socket(fileno=os.dup(descriptor)) for descriptor in our_sockets().values()]:
        try:
            there = sock.family is socket.AF_INET and sock.getsockname()[1] == end.port and sock.getpeername()
        except OSError:  # one that only listens has no peer
            there = None
        if there:
            made.append(sock)
        else:
            sock.close()
    return made


class Net:
    """The TCP transports of a test. The end of its `with` block closes all; no thread or new socket may remain."""

    def __init__(self) -> None:
        self.ends: list[TcpTransport] = []
        self._sockets = our_sockets()

    def __enter__(self) -> "Net":
        return self

    def __exit__(self, *_: object) -> None:
        for end in self.ends:
            end.close(0.0)
        assert our_threads() == []
        gc.collect()
        assert our_sockets().keys() <= self._sockets.keys()  # what another test has left may go meanwhile

    def add(self, name: str, secret: str = SECRET) -> tuple[TcpTransport, Inbox]:
        inbox = Inbox()
        end = TcpTransport(name, secret, inbox)
        self.ends.append(end)
        return end, inbox

    def pair(self) -> tuple[TcpTransport, Inbox, TcpTransport, Inbox]:
        (a, a_in), (b, b_in) = self.add("a"), self.add("b")
        for end in (a, b):
            end.peers({"a": ("127.0.0.1", a.port), "b": ("127.0.0.1", b.port)})
        return a, a_in, b, b_in


def refused(sock: socket.socket, last: bytes | bytearray = b"") -> bool:
    """Return whether the other side closes or resets the link within 8 s without an answer. last: bytes sent before."""
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


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Iterator[Net]:
    """Yield a `Net` in which bodies of 100 bytes or more are large, and `send` itself sends frames up to 150 bytes."""
    monkeypatch.setattr(links, "LARGE_BODY", 100)
    monkeypatch.setattr(links, "AT_ONCE", 150)
    with Net() as made:
        yield made
