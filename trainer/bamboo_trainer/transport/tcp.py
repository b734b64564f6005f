"""The transport over plain TCP: one simplex link per sender, receiver and lane.

Locks: `_news` keeps the events LinkDown and LinkUp in order; only the links' own threads take it, always before
`_changed`. `_changed` guards the tables; no thread calls `deliver` while it holds `_changed`. So `deliver` may call
send() and peers(), and may take a lock that other threads hold while they call these.

After close(), or after peers() has removed a peer, a link's thread may still deliver one event that it already holds.
"""

import hmac
import logging
import socket
import threading
import time
from collections.abc import Mapping
from functools import partial

from bamboo_core.planning.plan import WorkerId
from bamboo_trainer.frames import Frame, FrameKind
from bamboo_trainer.transport import links, wire
from bamboo_trainer.transport.base import Arrived, Buffer, Deliver, LinkDown, LinkUp, ordinary
from bamboo_trainer.transport.links import Inbound, LinkStates, Outbound

logger = logging.getLogger(__name__)

PLAN_SECONDS = 5.0  # how long a link may wait for the plan that names its sender
JOIN_SECONDS = 5.0  # for all threads together
MAX_STRANGERS = 128  # connections whose senders are not proven yet


class TcpTransport:
    """A transport over TCP. It listens at once, on a free port, and connects to a peer at each lane's first frame."""

    def __init__(self, worker: WorkerId, secret: str, deliver: Deliver, host: str = "127.0.0.1") -> None:
        self._me = worker
        self._secret = secret.encode()
        self._buffer: Buffer = ordinary
        self._state_rate: float | None = None
        self._deliver = deliver
        self._news = threading.Lock()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._peers: dict[WorkerId, tuple[str, int]] = {}
        self._outbound: dict[tuple[WorkerId, wire.Lane], Outbound] = {}
        self._inbound: dict[tuple[WorkerId, wire.Lane], Inbound] = {}  # the admitted ones
        self._accepted: set[Inbound] = set()  # all with a running thread
        self._in, self._out = LinkStates(), LinkStates()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self.sent, self.resent = [0] * (max(FrameKind) + 1), [0] * (max(FrameKind) + 1)  # bytes, by kind of frame
        self.broken = 0  # LinkDown events, and links replaced before their break was noticed
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.port: int = self._listener.getsockname()[1]
        with self._changed:
            self._start(threading.Thread(target=self._accept, name=f"bamboo-accept-{worker}", daemon=True))

    def trust(self, secret: str, state_rate: float | None = None, buffer: Buffer = ordinary) -> None:
        """Set the job's secret and the options of links, for links created from now on.

        state_rate: limit for the queued frames of each link of the lane STATE, in bytes per second; None: no limit.
        buffer: allocates the memory that tensors are read into.
        """
        self._secret, self._state_rate, self._buffer = secret.encode(), state_rate, buffer

    def send(self, peer: WorkerId, frame: Frame) -> None:
        """See Transport. Raises ValueError or TypeError if the frame itself cannot be encoded."""
        key = (peer, wire.lane_of(frame.address))
        encoded = wire.encode_frame(frame)
        size = encoded.size
        with self._lock:
            if self._closed or peer not in self._peers:
                logger.debug("frame to %s dropped: not in the plan", peer)
                return
            link = self._outbound.get(key)
            if link is None:
                route = (self._me, *key)
                address = self._peers[peer]
                reports = (partial(self._report, broke=True), partial(self._report, broke=False))
                rate = self._state_rate if key[1] is wire.Lane.STATE else None
                link = Outbound(route, self._secret, address, *reports, rate)
                self._outbound[key] = link
                self._start(link.thread)
            self.sent[frame.address.kind] += size
            if frame.payload is not None and frame.again:
                self.resent[frame.address.kind] += size
        link.send(encoded)

    def is_sending(self, peer: WorkerId, lane: wire.Lane) -> bool:
        """Return whether a frame to that peer on this lane is queued or being sent."""
        with self._lock:
            link = self._outbound.get((peer, lane))
        return link is not None and link.is_sending

    def peers(self, peers: Mapping[WorkerId, tuple[str, int]]) -> None:
        """Set the other workers of the newest plan, and close links to and from workers that have left it."""
        with self._changed:
            gone = self._peers.keys() - peers.keys()
            self._peers = dict(peers)
            for key in [key for key in self._outbound if key[0] in gone]:
                self._outbound.pop(key).close()
            for key in [key for key in self._inbound if key[0] in gone]:
                self._inbound.pop(key).close()
            for peer in gone:
                self._in.forget(peer)
                self._out.forget(peer)
            self._changed.notify_all()

    def close(self, flush_seconds: float) -> None:
        """See Transport. No events follow, except those that links' threads already hold."""
        deadline = time.monotonic() + flush_seconds
        with self._changed:
            outbound = list(self._outbound.values())
        for link in outbound:
            if not link.flush(deadline - time.monotonic()):
                logger.warning("frames to %s not flushed within %.1f s", link.peer, flush_seconds)
        with self._changed:
            self._closed = True
            ends: list[Outbound | Inbound] = [*self._outbound.values(), *self._accepted]
            threads = list(self._threads)
            self._outbound.clear()
            self._inbound.clear()
            self._changed.notify_all()
        links.wake(self._listener)
        for end in ends:
            end.close()
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._listener.close()

    def admit(self, link: Inbound, hello: wire.LinkHello) -> bool:
        """Admit a link, which replaces an older one of the same sender and lane. Return False if no plan names its
        sender within PLAN_SECONDS, or this transport is closed. Only links' own threads call this.

        Deliver a LinkUp if an earlier link of this sender and lane broke, or is replaced now because its break was not
        noticed: frames may be lost. Deliver none if a still newer link has come meanwhile.
        """
        key = (hello.worker, hello.lane)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or hello.worker in self._peers, PLAN_SECONDS)
            if self._closed or hello.worker not in self._peers:
                return False
            older = self._inbound.get(key)
            self._inbound[key] = link
        if older is not None:
            older.close()
        with self._news:
            with self._changed:
                if older is not None:
                    self._in.broke(*key)
                    self.broken += 1
                due = self._inbound.get(key) is link and self._in.stands(*key)
            if due:
                self._deliver(LinkUp(hello.worker))
        return True

    def find(self, hello: wire.LinkHello) -> Inbound | None:
        """Return the newest link of the hello's sender and lane if it is the link that the hello joins, else None."""
        with self._lock:
            link = self._inbound.get((hello.worker, hello.lane))
        return link if link is not None and hmac.compare_digest(link.nonce, hello.joins) else None

    def arrived(self, link: Inbound, frame: Frame) -> None:
        """Deliver a frame unless its link was replaced or removed. Only links' own threads call this."""
        assert link.hello is not None
        with self._lock:
            current = self._inbound.get((link.hello.worker, link.hello.lane)) is link
        if current:
            self._deliver(Arrived(link.hello.worker, frame))

    def left(self, link: Inbound, reason: str) -> None:
        """Forget a connection that has ended; deliver a LinkDown if one is due. Only links' own threads call this."""
        with self._news:
            with self._changed:
                self._accepted.discard(link)
                key = (link.hello.worker, link.hello.lane) if link.hello else None
                if key is None or self._inbound.get(key) is not link:
                    return
                del self._inbound[key]
                due = self._in.broke(*key)
            logger.info("%s link from %s ended: %s", key[1], key[0], reason)
            if due:
                self.broken += 1
                self._deliver(LinkDown(key[0]))

    def _report(self, link: Outbound, *, broke: bool) -> None:
        with self._news:
            with self._changed:
                if self._outbound.get((link.peer, link.lane)) is not link:
                    return  # a link of an earlier plan
                decide = self._out.broke if broke else self._out.stands
                due = decide(link.peer, link.lane)
            if due:
                self.broken += broke
                self._deliver(LinkDown(link.peer) if broke else LinkUp(link.peer))

    def _start(self, thread: threading.Thread) -> None:
        """Start a thread, and keep it for `close`. The caller holds the lock."""
        self._threads = [other for other in self._threads if other.is_alive()]
        thread.start()
        self._threads.append(thread)

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    logger.warning("accept: %s", error)
                    time.sleep(0.05)  # perhaps out of file descriptors
                continue
            with self._changed:
                if self._closed or sum(link.hello is None for link in self._accepted) >= MAX_STRANGERS:
                    sock.close()
                    continue
                link = Inbound(sock, self._me, self._secret, self, self._buffer)
                self._accepted.add(link)
                self._start(link.thread)
