"""A transport within one thread: one first-in-first-out queue for the whole network."""

from collections import deque
from collections.abc import Mapping

import msgspec
import torch

from bamboo_core.planning.plan import WorkerId
from bamboo_trainer.frames import Frame
from bamboo_trainer.transport.base import Arrived, Deliver, Event, LinkDown
from bamboo_trainer.transport.wire import Lane


def travelled(frame: Frame) -> Frame:
    """Return the frame as a receiver gets it: with copied tensors, and a payload encoded and decoded by msgpack."""
    tensors = tuple(t.detach().clone(memory_format=torch.contiguous_format) for t in frame.tensors)
    meta = msgspec.msgpack.decode(msgspec.msgpack.encode(frame.payload, enc_hook=str))
    return Frame(address=frame.address, epoch=frame.epoch, origin=frame.origin, tensors=tensors, payload=meta)


class MemoryNetwork:
    """A network that delivers events, when pumped, in the order in which they were caused."""

    def __init__(self) -> None:
        self._queue: deque[tuple[WorkerId, Event]] = deque()
        self._alive: dict[WorkerId, MemoryTransport] = {}

    def attach(self, worker: WorkerId, deliver: Deliver) -> "MemoryTransport":
        """Add a worker and return its transport. Callers attach each worker only once."""
        self._alive[worker] = MemoryTransport(self, worker, deliver)
        return self._alive[worker]

    def kill(self, worker: WorkerId) -> None:
        """Cut a worker off. Workers that know it get the frames that it has sent, and then LinkDown."""
        if self._alive.pop(worker, None):
            down = LinkDown(worker)
            self._queue.extend((to, down) for to, other in self._alive.items() if worker in other.known)

    def pump(self) -> int:
        """Deliver all queued events that workers admit, and the events that these cause. Return their number."""
        count = 0
        while self._queue:
            to, event = self._queue.popleft()
            target = self._alive.get(to)
            if target is not None and target.admits(event):
                target.deliver(event)
                count += 1
        return count

    def send(self, sender: "MemoryTransport", peer: WorkerId, frame: Frame) -> None:
        """Queue a frame, unless either worker was killed or the sender does not know the peer. For transports only."""
        if sender.worker in self._alive and peer in sender.known and peer in self._alive:
            self._queue.append((peer, Arrived(sender.worker, travelled(frame))))

    def arrive_again(self, worker: WorkerId, events: list[Event]) -> None:
        """Queue events that waited for the worker's plan; for transports only."""
        self._queue.extend((worker, event) for event in events)


class MemoryTransport:
    """One worker's transport on a MemoryNetwork; implements `Transport`."""

    def __init__(self, network: MemoryNetwork, worker: WorkerId, deliver: Deliver) -> None:
        self.worker, self.deliver = worker, deliver
        self.known: frozenset[WorkerId] = frozenset()
        self._former: frozenset[WorkerId] = frozenset()
        self._early: dict[WorkerId, list[Event]] = {}  # from workers that the plan does not have yet
        self._network = network

    def send(self, peer: WorkerId, frame: Frame) -> None:
        """Send a frame; see `Transport`."""
        self._network.send(self, peer, frame)

    def is_sending(self, peer: WorkerId, lane: Lane) -> bool:
        """Return False, since frames leave at once; see `Transport`."""
        return False

    def peers(self, peers: Mapping[WorkerId, tuple[str, int]]) -> None:
        """Set the reachable workers, without their addresses, and queue their waiting frames; see `Transport`."""
        self._former = (self._former | self.known) - peers.keys()
        self.known = frozenset(peers)
        for worker in [worker for worker in self._early if worker in peers]:
            self._network.arrive_again(self.worker, self._early.pop(worker))

    def close(self, flush_seconds: float) -> None:
        """Close the transport. Other workers see it as a death; frames sent before still arrive. See `Transport`."""
        self._network.kill(self.worker)

    def admits(self, event: Event) -> bool:
        """Return whether an event may be delivered, fenced as with TCP: frames of workers that the plan does not name
        yet wait, and frames of former members are dropped.
        """
        sender = event.sender if isinstance(event, Arrived) else event.peer
        if sender in self.known:
            return True
        if isinstance(event, Arrived) and sender not in self._former:
            self._early.setdefault(sender, []).append(event)
        return False
