"""The transport within one process, for tests: one first-in-first-out queue for the whole network."""

import threading
from collections import deque
from collections.abc import Mapping

from bamboo.plan import WorkerId
from bamboo_trainer.frames import Frame
from bamboo_trainer.transport import wire
from bamboo_trainer.transport.base import Arrived, Deliver, Event, LinkDown, LinkUp


class MemoryNetwork:
    """Events go out in the order in which they were caused: at once if synchronous, else when pumped."""

    def __init__(self, *, synchronous: bool = False) -> None:
        self._synchronous = synchronous
        self._lock = threading.Lock()
        self._queue: deque[tuple[WorkerId, Event]] = deque()
        self._alive: dict[WorkerId, MemoryTransport] = {}
        self._dead: set[WorkerId] = set()
        self._pumping = False

    def attach(self, worker: WorkerId, deliver: Deliver) -> "MemoryTransport":
        """A worker joins. One that was killed may come back: those whose plan has it see LinkUp."""
        with self._lock:
            if worker in self._alive:
                raise ValueError(f"{worker} is attached already")
            transport = MemoryTransport(self, worker, deliver)
            self._alive[worker] = transport
            if worker in self._dead:
                self._dead.discard(worker)
                self._tell(LinkUp(worker))
        self._maybe_pump()
        return transport

    def kill(self, worker: WorkerId, *, lose_sent: bool = False) -> None:
        """It neither sends nor receives any more. lose_sent: what it had queued is lost, too."""
        with self._lock:
            if self._alive.pop(worker, None) is None:
                return
            self._dead.add(worker)
            if lose_sent:
                for transport in self._alive.values():
                    transport.early.pop(worker, None)
                self._queue = deque(
                    (to, event)
                    for to, event in self._queue
                    if not (isinstance(event, Arrived) and event.sender == worker)
                )
            self._tell(LinkDown(worker))
        self._maybe_pump()

    def pump(self, limit: int | None = None) -> int:
        """Deliver at most `limit` events, also those that they cause; how many. No-op within itself."""
        with self._lock:
            if self._pumping:
                return 0
            self._pumping = mine = True
        count = 0
        try:
            while limit is None or count < limit:
                with self._lock:
                    if not self._queue:
                        # NB: not later, else an event queued in between would be left behind.
                        self._pumping = mine = False
                        return count
                    to, event = self._queue.popleft()
                    target = self._alive.get(to)
                    admitted = target is not None and target.admits(event)
                if target is not None and admitted:
                    target.deliver(event)
                    count += 1
            return count
        finally:
            if mine:
                with self._lock:
                    self._pumping = False

    def _tell(self, event: LinkDown | LinkUp) -> None:
        """Queue it for all whose plan has that worker. Caller holds the lock."""
        self._queue.extend((to, event) for to, other in self._alive.items() if event.peer in other.known)

    def _maybe_pump(self) -> None:
        if self._synchronous:
            self.pump()

    def _send(self, sender: "MemoryTransport", peer: WorkerId, frame: Frame) -> None:
        with self._lock:
            attached = self._alive.get(sender.worker) is sender
            if not attached or peer not in sender.known or peer not in self._alive:
                return
            self._queue.append((peer, Arrived(sender.worker, frame)))
        self._maybe_pump()

    def _peers(self, transport: "MemoryTransport", peers: frozenset[WorkerId]) -> None:
        with self._lock:
            transport.former = (transport.former | transport.known) - peers
            transport.known = peers
            ready = [worker for worker in transport.early if worker in peers]
            for worker in ready:
                self._queue.extend((transport.worker, event) for event in transport.early.pop(worker))
        self._maybe_pump()

    def _leave(self, transport: "MemoryTransport") -> None:
        if self._alive.get(transport.worker) is transport:
            self.kill(transport.worker)


class MemoryTransport:
    """A worker's end. Its fields but `worker` and `deliver` belong to the network, under its lock."""

    def __init__(self, network: MemoryNetwork, worker: WorkerId, deliver: Deliver) -> None:
        self.worker = worker
        self.deliver = deliver
        self.known: frozenset[WorkerId] = frozenset()
        self.former: frozenset[WorkerId] = frozenset()
        self.early: dict[WorkerId, list[Event]] = {}  # from workers that the plan does not have yet
        self._network = network

    def send(self, peer: WorkerId, frame: Frame) -> None:
        """See Transport."""
        self._network._send(self, peer, wire.travelled(frame))

    def peers(self, peers: Mapping[WorkerId, tuple[str, int]]) -> None:
        """See Transport. The addresses mean nothing here."""
        self._network._peers(self, frozenset(peers))

    def close(self, flush_seconds: float) -> None:
        """See Transport. Others see it as a death; what was sent before still arrives."""
        self._network._leave(self)

    def admits(self, event: Event) -> bool:
        """Fencing, as over TCP: early frames wait for the plan, those of former members are dropped."""
        sender = event.sender if isinstance(event, Arrived) else event.peer
        if sender in self.known:
            return True
        if isinstance(event, Arrived) and sender not in self.former:
            self.early.setdefault(sender, []).append(event)
        return False
