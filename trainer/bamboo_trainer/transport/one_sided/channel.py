"""Both ends of a link whose large bodies are written one-sided, from a source and into a target that are made with the
first such body.

While a body is under way each end calls its own every so often, first in quick succession and then, if nothing moves,
as with a frozen peer, seldom; between bodies neither end does anything.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from bamboo_core.planning.plan import WorkerId
from bamboo_trainer.transport import wire
from bamboo_trainer.transport.bodies import SendingLink
from bamboo_trainer.transport.one_sided.contract import SLOT_BYTES, SLOTS, OneSided, WriteSource, WriteTarget
from bamboo_trainer.transport.one_sided.protocol import (
    FILLED,
    TAKEN,
    chunks,
    encode_landing,
    gather,
    receive_landing,
    scatter,
)
from bamboo_trainer.transport.sockets import SocketReader

QUICK_SECONDS, SLOW_SECONDS = 100e-6, 5e-3  # between two looks
PATIENCE_SECONDS = 0.1  # without movement, after which the looks are seldom


class OneSidedChannel:
    """See BodyChannel."""

    def __init__(self, worker: WorkerId, way: OneSided) -> None:
        self._me, self._way, self.takes_bodies = worker, way, True

    def sender(self, link: SendingLink, rate: float | None) -> "OneSidedSender":
        return OneSidedSender(self._way, f"{self._me}-to-{link.peer}-{link.lane}", rate)

    def receiver(self, link: str, sock: socket.socket, reader: SocketReader) -> "OneSidedReceiver":
        return OneSidedReceiver(self._way, f"{self._me}-from-{link}", sock, reader)


class _Looks:
    """How long to wait until the next look."""

    def __init__(self) -> None:
        self.moved()

    def moved(self) -> None:
        self._since = time.monotonic()

    def pause(self) -> float:
        return QUICK_SECONDS if time.monotonic() - self._since < PATIENCE_SECONDS else SLOW_SECONDS


@dataclass(slots=True)
class _Transfer:
    """A write that is under way."""

    name: int
    due: float  # when the receiver may have it, by the link's rate
    written: bool = False


def _pause(first: _Transfer, looks: _Looks) -> float:
    return max(0.0, first.due - time.monotonic()) if first.written else looks.pause()


class OneSidedSender:
    """See BodySender."""

    def __init__(self, way: OneSided, link: str, rate: float | None) -> None:
        self._way, self._link, self._rate = way, link, rate
        self._source: WriteSource | None = None
        self._changed = threading.Condition()
        self._landing: bytes | None = None
        self._ended = False  # the connection
        self._begun = self._filled = self._taken = 0  # chunks; taken: by the receiver
        self._due = 0.0

    def listen(self, sock: socket.socket) -> None:
        """See BodySender."""
        try:
            landing = receive_landing(sock)
            with self._changed:
                self._landing = landing
                self._changed.notify_all()
            while said := sock.recv(SLOTS):
                with self._changed:
                    self._taken += len(said)
                    if said.strip(TAKEN) or self._taken > self._filled:
                        raise wire.WireError(f"not what a receiver of bodies says: {said!r}")
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def send(self, sock: socket.socket, head: wire.Buffer, body: Sequence[wire.Buffer]) -> None:
        """See BodySender. Returns when all of the body is in the receiver's memory."""
        sock.sendall(head)
        source = self._reached()
        rest, flying, looks = chunks(body, SLOT_BYTES), deque[_Transfer](), _Looks()
        chunk = next(rest, None)
        self._due = max(self._due, time.monotonic())
        while chunk is not None or flying:
            taken, moved = self._seen(), False
            if flying and self._arrived(source, flying[0]):
                flying.popleft()
                with self._changed:
                    self._filled += 1
                sock.sendall(FILLED)
                moved = True
            if chunk is not None and self._begun - taken < SLOTS:
                flying.append(self._begin(source, chunk))
                chunk, moved = next(rest, None), True
            if moved:
                looks.moved()
            else:
                self._wait(taken, _pause(flying[0], looks) if flying else None)

    def settle(self) -> None:
        """See BodySender."""
        while (taken := self._seen()) != self._filled:
            self._wait(taken, None)

    def end(self, *, clean: bool) -> None:
        """See BodySender. Who waits is released by `listen`, which the connection's end ends."""

    def close(self) -> None:
        """See BodySender."""
        if self._source is not None:
            self._source.close()

    def _reached(self) -> WriteSource:
        """The source, once the receiver has said where its ring is."""
        with self._changed:
            self._changed.wait_for(lambda: self._landing or self._ended)
            landing = self._landing
        self._seen()
        if self._source is None:
            assert landing is not None
            self._source = self._way.source(self._link, landing)
        return self._source

    def _begin(self, source: WriteSource, chunk: Sequence[memoryview]) -> _Transfer:
        slot = self._begun % SLOTS
        size = gather(chunk, source.slot(slot))
        self._begun += 1
        if self._rate is not None:
            self._due += size / self._rate
        return _Transfer(source.write(slot, size), self._due)

    def _arrived(self, source: WriteSource, transfer: _Transfer) -> bool:
        transfer.written = transfer.written or source.written(transfer.name)
        return transfer.written and transfer.due <= time.monotonic()

    def _seen(self) -> int:
        """How many chunks the receiver has taken. ConnectionResetError once the connection has ended."""
        with self._changed:
            if self._ended:
                raise ConnectionResetError("closed by the peer")
            return self._taken

    def _wait(self, taken: int, seconds: float | None) -> None:
        """Waits until the receiver says something, at most that long."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._taken != taken, seconds)


class OneSidedReceiver:
    """See BodyReceiver."""

    def __init__(self, way: OneSided, link: str, sock: socket.socket, reader: SocketReader) -> None:
        self._way, self._link, self._sock, self._reader = way, link, sock, reader
        self._target: WriteTarget | None = None
        self._taken = 0  # chunks

    def receive_into(self, views: Sequence[memoryview]) -> None:
        """See BodyReceiver."""
        if self._target is None:
            self._target = self._way.target(self._link)
            self._sock.sendall(encode_landing(self._target.landing()))
        for chunk in chunks(views, SLOT_BYTES):
            self._await(self._target)
            if (said := self._reader.receive(1)) != FILLED:
                raise wire.WireError(f"not what a sender of bodies says: {bytes(said)!r}")
            scatter(self._target.slot(self._taken % SLOTS), chunk)
            self._taken += 1
            self._sock.sendall(TAKEN)

    def join(self, sock: socket.socket) -> bool:
        """No further connection carries anything."""
        return False

    def end(self) -> None:
        """See BodyReceiver. Who waits is released by the connection's end."""

    def close(self) -> None:
        """See BodyReceiver."""
        if self._target is not None:
            self._target.close()

    def _await(self, target: WriteTarget) -> None:
        """Take in what is written, until the sender says something or the connection ends."""
        looks = _Looks()
        while not self._reader.has_more():
            target.progress()
            time.sleep(looks.pause())
