"""Both ends of a link whose large bodies are written one-sided, from a source and into a target that are made with the
first such body.

While a body is under way each end calls its own every so often, first in quick succession and then, if nothing moves,
as with a frozen peer, seldom; between bodies neither end does anything.
"""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from bamboo_core.planning.plan import WorkerId
from bamboo_trainer.transport import wire
from bamboo_trainer.transport.bodies import SendingLink
from bamboo_trainer.transport.one_sided.contract import SLOT_BYTES, SLOTS, OneSided, WriteSource, WriteTarget
from bamboo_trainer.transport.one_sided.protocol import FILLED, TAKEN, chunks, encode_landing, receive_landing
from bamboo_trainer.transport.one_sided.slot_copies import SlotCopies
from bamboo_trainer.transport.sockets import SocketReader

logger = logging.getLogger(__name__)
End = TypeVar("End", WriteSource, WriteTarget)

QUICK_SECONDS, SLOW_SECONDS = 100e-6, 5e-3  # between two looks
PATIENCE_SECONDS = 0.1  # without movement, after which the looks are seldom


class OneSidedChannel:
    """See BodyChannel. direct: the way of boundary tensors between GPUs, if not the one of all others."""

    def __init__(self, worker: WorkerId, way: OneSided, direct: OneSided | None = None) -> None:
        self._me, self._way, self._direct, self.takes_bodies = worker, way, direct, True

    def reads_devices(self, lane: wire.Lane) -> bool:
        return self._ways(lane)[0].device.type != "cpu"

    def sender(self, link: SendingLink, rate: float | None) -> "OneSidedSender":
        return OneSidedSender(self._ways(link.lane), f"{self._me}-to-{link.peer}-{link.lane}", rate)

    def receiver(
        self, sender: WorkerId, lane: wire.Lane, sock: socket.socket, reader: SocketReader
    ) -> "OneSidedReceiver":
        return OneSidedReceiver(self._ways(lane), f"{self._me}-from-{sender}-{lane}", sock, reader)

    def _ways(self, lane: wire.Lane) -> Sequence[OneSided]:
        """The ways of that lane, the best first."""
        return (self._direct, self._way) if self._direct and lane is wire.Lane.BOUNDARY else (self._way,)


def _first_end(link: str, ways: Sequence[OneSided], make: Callable[[OneSided], End]) -> tuple[OneSided, End]:
    """An end of the first of these ways that can make one. Raises OSError if none can."""
    for way in ways[:-1]:
        try:
            return way, make(way)
        except OSError as error:  # a GPU may have no room for a ring
            logger.warning("%s goes without memory of %s: %s", link, way.device, error)
    return ways[-1], make(ways[-1])


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

    def __init__(self, ways: Sequence[OneSided], link: str, rate: float | None) -> None:
        self._ways, self._link, self._rate = ways, link, rate
        self._source: WriteSource | None = None
        self._copies = SlotCopies()
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

    def send(self, sock: socket.socket, frame: wire.Encoded) -> None:
        """See BodySender. Returns when all of the body is in the receiver's memory."""
        sock.sendall(frame.head)
        source = self._reached()
        rest, flying, looks = chunks(frame.parts, SLOT_BYTES), deque[_Transfer](), _Looks()
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
                flying.append(self._begin(source, chunk, frame.made))
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
            _, self._source = _first_end(self._link, self._ways, lambda way: way.source(self._link, landing))
        return self._source

    def _begin(self, source: WriteSource, chunk: Sequence[Tensor], made: torch.cuda.Event | None) -> _Transfer:
        slot = self._begun % SLOTS
        size = self._copies.gather(chunk, source.slot(slot), made)
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

    def __init__(self, ways: Sequence[OneSided], link: str, sock: socket.socket, reader: SocketReader) -> None:
        self._ways, self._link, self._sock, self._reader = ways, link, sock, reader
        self._reached: tuple[OneSided, WriteTarget] | None = None
        self._copies = SlotCopies()
        self._taken = 0  # chunks

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """See BodyReceiver. It is where the ring is, if there is room."""
        device = self._reach()[0].device
        return None if device.type == "cpu" else self._copies.empty(shape, dtype, device)

    def receive_into(self, tensors: Sequence[Tensor]) -> torch.cuda.Event | None:
        """See BodyReceiver."""
        made: torch.cuda.Event | None = None
        _, target = self._reach()
        for chunk in chunks(tensors, SLOT_BYTES):
            self._await(target)
            if (said := self._reader.receive(1)) != FILLED:
                raise wire.WireError(f"not what a sender of bodies says: {bytes(said)!r}")
            made = self._copies.scatter(target.slot(self._taken % SLOTS), chunk) or made
            self._taken += 1
            self._sock.sendall(TAKEN)
        return made

    def join(self, sock: socket.socket) -> bool:
        """No further connection carries anything."""
        return False

    def end(self) -> None:
        """See BodyReceiver. Who waits is released by the connection's end."""

    def close(self) -> None:
        """See BodyReceiver."""
        if self._reached:
            self._reached[1].close()

    def _reach(self) -> tuple[OneSided, WriteTarget]:
        """The target and its way; the sender is told where it is when it is made."""
        if self._reached is None:
            self._reached = _first_end(self._link, self._ways, lambda way: way.target(self._link))
            self._sock.sendall(encode_landing(self._reached[1].landing()))
        return self._reached

    def _await(self, target: WriteTarget) -> None:
        """Take in what is written, until the sender says something or the connection ends."""
        looks = _Looks()
        while not self._reader.has_more():
            target.progress()
            time.sleep(looks.pause())
