"""Routing of frames: the plan in force, the outbox to other workers, and the log of frames that may be resent."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

import msgspec
from torch import Tensor

from bamboo_core.planning.heirs import heirs_may_differ
from bamboo_core.planning.plan import Cell, Plan, WorkerId
from bamboo_core.planning.ring import share_nodes
from bamboo_core.planning.splits.device_stages import cell_of, cell_parts
from bamboo_trainer.frames import BOUNDARY, Address, Frame, FrameFacts, FrameKind, PartialSum, is_of_microbatch
from bamboo_trainer.memory.host_copies import AtOnce, Copy, HostCopies, Parts
from bamboo_trainer.transport.base import Transport
from bamboo_trainer.transport.wire import Lane, lane_of


class MessageLog:
    """A log of sent frames by destination cell, kept for two steps: the commit of step k drops frames older than k."""

    def __init__(self) -> None:
        self._frames: dict[Cell, dict[Address, Frame]] = {}

    def add(self, frame: Frame) -> None:
        """Add a frame as the newest. It replaces an earlier frame with the same address."""
        frames = self._frames.setdefault(frame.address.cell, {})
        frames.pop(frame.address, None)
        frames[frame.address] = frame

    def get(self, address: Address) -> Frame | None:
        return self._frames.get(address.cell, {}).get(address)

    def to(self, cell: Cell) -> Iterator[Frame]:
        yield from list(self._frames.get(cell, {}).values())

    def frames(self) -> Iterator[Frame]:
        """Return an iterator over the frames for all cells. Do not change the log meanwhile."""
        return (frame for logged in self._frames.values() for frame in logged.values())

    def committed(self, step: int) -> None:
        for frames in self._frames.values():
            for key in [k for k in frames if k.step < step]:
                del frames[key]


class PlanState:
    """The plans that a worker knows. current: the plan in force. pending: a boundary plan that waits until the root has
    committed under it.

    devices: the number of devices over which the worker divides each stage. heirs_may_differ: adjacent stages lost
    together may have no common heir under the plan in force. nodes_are_shared: some workers share a failure domain.
    """

    def __init__(self, worker: WorkerId, first: Plan, devices: int = 1) -> None:
        self.worker, self.devices = worker, devices
        self.current = first
        self.heirs_may_differ, self.nodes_are_shared = heirs_may_differ(first), share_nodes(first.workers)
        self._workers = first.worker_ids()  # of the plan in force
        self.pending: Plan | None = None
        self.links_down: set[WorkerId] = set()
        self._required_epoch = 0

    def offer(self, plan: Plan) -> Plan | None:
        """Receive a plan from the coordinator; return it if it must be activated now, else None. An old plan is
        ignored; a boundary plan under which the root has not committed becomes `pending`.
        """
        if plan.epoch <= self.current.epoch:
            return None
        if plan.boundary and self._required_epoch < plan.epoch:
            self.pending = plan
            return None
        return plan

    def require(self, epoch: int) -> Plan | None:
        """Note that the root has committed under an epoch's plan; return the pending plan if due now, else None."""
        self._required_epoch = max(self._required_epoch, epoch)
        return self.pending if self.pending and self.pending.epoch <= self._required_epoch else None

    def activate(self, plan: Plan) -> None:
        """Put a plan in force. Drop the pending plan unless it is newer, and broken links to workers not in `plan`."""
        self.current = plan
        self.heirs_may_differ, self.nodes_are_shared = heirs_may_differ(plan), share_nodes(plan.workers)
        self._workers = plan.worker_ids()
        if self.pending and self.pending.epoch <= plan.epoch:
            self.pending = None
        self.links_down &= plan.worker_ids()

    @property
    def newest(self) -> Plan:
        """The newest plan known here: the pending one, else the plan in force."""
        return self.pending or self.current

    @property
    def stages(self) -> int:
        return len(self.current.stages)

    @property
    def is_outdated(self) -> bool:
        """Whether the root has switched to a plan that is not in force here yet."""
        return self._required_epoch > self.current.epoch

    def owner(self, cell: Cell) -> WorkerId:
        return self.current.at(cell).owner

    def parts(self, cell: Cell) -> list[Cell]:
        """Return the cells that divide a stage over a worker's devices, one for each device. cell: any of them."""
        return cell_parts(cell_of(cell, self.devices), self.devices)

    def are_parts(self, cells: Iterable[Cell]) -> bool:
        """Return whether all these cells are parts, on devices, of one stage of one pipeline; True for no cells."""
        return len({cell_of(cell, self.devices) for cell in cells}) <= 1

    def others(self) -> set[WorkerId]:
        return set(self._workers) - {self.worker}

    def accepts(self, sender: WorkerId, epoch: int) -> bool:
        """Return whether to accept a frame: its epoch is newer than the plan's, or its sender is in the plan."""
        return epoch > self.current.epoch or sender in self._workers

    def link_broke(self, peer: WorkerId) -> bool:
        """Note a broken link if the peer belongs to the plan; return whether it does."""
        if peer not in self._workers:
            return False
        self.links_down.add(peer)
        return True

    def link_stands(self, peer: WorkerId) -> bool:
        """Note a working link. Return whether the peer belongs to the plan."""
        self.links_down.discard(peer)
        return peer in self._workers


Received = tuple[WorkerId, Frame]  # sender and frame
_DIRECT: Final = BOUNDARY | {FrameKind.TIED}  # tensors that stages exchange within a step, device to device


class _Leaving(NamedTuple):
    """A frame that is sent, or only logged, once its tensors are copied."""

    address: Address
    copy: Copy
    payload: Any
    receiver: WorkerId | None  # the worker it is for; None: it is for a cell
    is_here: bool = False  # its cell is on this worker, and already has it


class Outbox:
    """The sender of frames to the workers in the plan in force. log: frames to cells, while a worker may need them.

    A frame leaves when its tensors are in host memory, while the engine continues; frames on the same lane keep their
    order. Stages of this worker get each other's tensors at once, on any device; the log's copy is made separately.
    """

    def __init__(
        self,
        plan: PlanState,
        transport: Transport,
        received: deque[Received],
        copies: HostCopies | None = None,
        receiver: Callable[[Address], WorkerId] | None = None,
    ) -> None:
        """Create the outbox.

        received: takes the frames that this worker sends to itself, as when it owns two cells in a row. receiver:
        returns the worker for a cell's frame; by default the cell's owner.
        """
        self._receiver = receiver or (lambda address: plan.owner(address.cell))
        self._plan, self._transport, self._received = plan, transport, received
        self._copies = copies or AtOnce()
        self._leaving: dict[Lane, deque[_Leaving]] = {lane: deque() for lane in Lane}
        self._beside: deque[_Leaving] = deque()  # copies for the log of frames that were already delivered here
        self._queues = (*self._leaving.values(), self._beside)
        self.log = MessageLog()

    def connect(self) -> None:
        """Set the other workers of the plan in force as the transport's peers."""
        workers = self._plan.current.workers
        self._transport.peers({p.worker: (p.host, p.port) for p in workers if p.worker != self._plan.worker})

    def frame(self, address: Address, tensors: Iterable[Tensor] = (), payload: Any = None) -> Frame:
        """Return a frame with tensors in host memory, after waiting for their copy."""
        return self._frame(address, self._copies.start(tensors).wait(), payload)

    def _frame(self, address: Address, tensors: Parts, payload: Any) -> Frame:
        plan = self._plan.current
        return Frame(address=address, epoch=plan.epoch, origin=plan.origin, tensors=tensors, payload=payload)

    def emit(self, address: Address, tensors: Iterable[Tensor] = (), payload: Any = None) -> None:
        """Send a frame to the worker that runs its cell, and keep it in the log."""
        if address.kind not in _DIRECT or self._receiver(address) != self._plan.worker:
            self._leave_after(address, tensors, payload, None)
            return
        here = self._copies.hand_over(tensors)
        self._received.append((self._plan.worker, self._frame(address, here, payload)))
        leaving = _Leaving(address, self._copies.start(here, bulk=True), payload, None, is_here=True)
        self._leave_in_turn(self._beside, leaving)

    def post(self, worker: WorkerId, address: Address, tensors: Iterable[Tensor], payload: Any) -> None:
        """Send a frame to `worker`, without keeping it in the log."""
        self._leave_after(address, tensors, payload, worker)

    def is_sending(self, worker: WorkerId, lane: Lane) -> bool:
        """Return whether a frame on this lane to that worker would have to wait for another frame."""
        return bool(self._leaving[lane]) or self._transport.is_sending(worker, lane)

    def _leave_after(
        self, address: Address, tensors: Iterable[Tensor], payload: Any, receiver: WorkerId | None
    ) -> None:
        """Send a frame once its tensors are copied and earlier frames on its lane have left."""
        lane = lane_of(address)
        copy = self._copies.start(tensors, bulk=lane is not Lane.BOUNDARY)
        self._leave_in_turn(self._leaving[lane], _Leaving(address, copy, payload, receiver))

    def _leave_in_turn(self, queue: deque[_Leaving], leaving: _Leaving) -> None:
        if queue or not leaving.copy.ready():
            queue.append(leaving)
        else:
            self._leave(leaving)

    def advance(self) -> None:
        """Send or log waiting frames, in each queue up to the first one whose tensors are not copied yet."""
        for queue in self._queues:
            while queue and queue[0].copy.ready():
                self._leave(queue.popleft())

    def finish(self) -> None:
        """Send or log all waiting frames, after waiting for their copies."""
        for queue in self._queues:
            while queue:
                self._leave(queue.popleft())

    def _leave(self, leaving: _Leaving) -> None:
        address = leaving.address
        frame = self._frame(address, leaving.copy.wait(), leaving.payload)
        if leaving.receiver is not None:
            self.send(leaving.receiver, frame)
            return
        self.log.add(frame)
        receiver = self._receiver(address)
        if not (leaving.is_here and receiver == self._plan.worker):
            self.send(receiver, frame)

    def send(self, worker: WorkerId, frame: Frame) -> None:
        if worker == self._plan.worker:
            self._received.append((worker, frame))
        else:
            self._transport.send(worker, frame)

    def resend(self, cell: Cell, worker: WorkerId | None = None, *, since: Address | None = None) -> None:
        """Send the logged frames for a cell again, to their receivers or to `worker`. A receiver ignores frames that
        it already has. Frames of tensors are marked as repeated. since: send only activations and gradients, from this
        address's step and microbatch on.
        """
        self.finish()
        epoch = self._plan.current.epoch
        for frame in self.log.to(cell):
            if since and not (is_of_microbatch(frame.address) and frame.address[3:5] >= since[3:5]):
                continue
            payload = frame.payload
            if isinstance(payload, PartialSum | FrameFacts):
                payload = msgspec.structs.replace(payload, again=True)
            elif payload is None:
                payload = FrameFacts(again=True)
            self.send(worker or self._receiver(frame.address), replace(frame, epoch=epoch, payload=payload))
