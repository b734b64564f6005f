"""The transport within one thread: one first-in-first-out queue for the whole network."""

from collections import defaultdict, deque
from collections.abc import Mapping

import msgspec
import torch

from bamboo_core.planning.plan import WorkerId
from bamboo_trainer.frames.frame import BOUNDARY, Frame, FrameKind
from bamboo_trainer.frames.tensors import flat_bytes
from bamboo_trainer.memory.host_copies import Parts
from bamboo_trainer.transport.base import Arrived, Deliver, Event, LinkDown
from bamboo_trainer.transport.one_sided.slot_copies import SlotCopies


def travelled(frame: Frame) -> Frame:
    """The frame as it would come out at the other end: tensors of its own, meta through msgpack."""
    tensors = tuple(t.detach().clone(memory_format=torch.contiguous_format) for t in frame.tensors)
    return _as_received(frame, tensors)


def _as_received(frame: Frame, tensors: Parts, made: torch.cuda.Event | None = None) -> Frame:
    meta = msgspec.msgpack.decode(msgspec.msgpack.encode(frame.payload, enc_hook=str))
    return Frame(
        address=frame.address, epoch=frame.epoch, origin=frame.origin, tensors=tensors, payload=meta, made=made
    )


class DirectLink:
    """What takes boundary tensors from a GPU's memory to that GPU's again, as the two ends of a one-sided link do."""

    def __init__(self) -> None:
        self._from, self._to = SlotCopies(), SlotCopies()

    def travelled(self, frame: Frame, device: torch.device) -> Frame:
        sent = [flat_bytes(tensor) for tensor in frame.tensors]
        slot = torch.empty(sum(map(len, sent)), dtype=torch.uint8)
        self._from.gather(sent, slot, frame.made)
        found = [self._to.empty(tensor.shape, tensor.dtype, device) for tensor in frame.tensors]
        there = tuple(tensor for tensor in found if tensor is not None)
        assert len(there) == len(found), "there is room for all of them"
        return _as_received(frame, there, self._to.scatter(slot, [flat_bytes(tensor) for tensor in there]))


class MemoryNetwork:
    """Events go out, when pumped, in the order in which they were caused. direct: the GPU of every worker from whose
    memory, and to whose, boundary tensors go; None: all go through host memory.
    """

    def __init__(self, direct: torch.device | None = None) -> None:
        self._queue: deque[tuple[WorkerId, Event]] = deque()
        self._alive: dict[WorkerId, MemoryTransport] = {}
        self.direct = direct
        self._links: defaultdict[tuple[WorkerId, WorkerId], DirectLink] = defaultdict(DirectLink)
        self.went_directly = 0

    def attach(self, worker: WorkerId, deliver: Deliver) -> "MemoryTransport":
        """A worker joins. It is never attached again."""
        self._alive[worker] = MemoryTransport(self, worker, deliver)
        return self._alive[worker]

    def kill(self, worker: WorkerId) -> None:
        """It neither sends nor receives any more; what it had sent still arrives."""
        if self._alive.pop(worker, None):
            down = LinkDown(worker)
            self._queue.extend((to, down) for to, other in self._alive.items() if worker in other.known)

    def pump(self) -> int:
        """Deliver what there is, also what that causes; how many events."""
        count = 0
        while self._queue:
            to, event = self._queue.popleft()
            target = self._alive.get(to)
            if target is not None and target.admits(event):
                target.deliver(event)
                count += 1
        return count

    def send(self, sender: "MemoryTransport", peer: WorkerId, frame: Frame) -> None:
        """Sends a frame; for transports only."""
        if sender.worker in self._alive and peer in sender.known and peer in self._alive:
            if self.direct and frame.made is not None:
                self.went_directly += 1
                there = self._links[sender.worker, peer].travelled(frame, self.direct)
            else:
                there = travelled(frame)
            self._queue.append((peer, Arrived(sender.worker, there)))

    def arrive_again(self, worker: WorkerId, events: list[Event]) -> None:
        """Lets events come again that had to wait for the worker's plan; for transports only."""
        self._queue.extend((worker, event) for event in events)


class MemoryTransport:
    """A worker's end."""

    def __init__(self, network: MemoryNetwork, worker: WorkerId, deliver: Deliver) -> None:
        self.worker, self.deliver = worker, deliver
        self.known: frozenset[WorkerId] = frozenset()
        self._former: frozenset[WorkerId] = frozenset()
        self._early: dict[WorkerId, list[Event]] = {}  # from workers that the plan does not have yet
        self._network = network

    def send(self, peer: WorkerId, frame: Frame) -> None:
        """See Transport."""
        self._network.send(self, peer, frame)

    def reads_devices(self, kind: FrameKind, size: int) -> bool:
        """See Transport."""
        return self._network.direct is not None and kind in BOUNDARY

    def peers(self, peers: Mapping[WorkerId, tuple[str, int]]) -> None:
        """See Transport. The addresses mean nothing here."""
        self._former = (self._former | self.known) - peers.keys()
        self.known = frozenset(peers)
        for worker in [worker for worker in self._early if worker in peers]:
            self._network.arrive_again(self.worker, self._early.pop(worker))

    def close(self, flush_seconds: float) -> None:
        """See Transport. Others see it as a death; what was sent before still arrives."""
        self._network.kill(self.worker)

    def admits(self, event: Event) -> bool:
        """Fencing, as over TCP: early frames wait for the plan, those of former members are dropped."""
        sender = event.sender if isinstance(event, Arrived) else event.peer
        if sender in self.known:
            return True
        if isinstance(event, Arrived) and sender not in self._former:
            self._early.setdefault(sender, []).append(event)
        return False
