"""The frames that this worker sends to others on the data plane, and keeps for sending again."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final, NamedTuple

import msgspec
from torch import Tensor

from bamboo_core.planning.plan import Cell, WorkerId
from bamboo_trainer.frames.frame import BOUNDARY, Address, Frame, FrameFacts, FrameKind, is_of_microbatch
from bamboo_trainer.frames.payloads import PartialSum
from bamboo_trainer.memory.host_copies import AtOnce, Copy, HostCopies, Parts
from bamboo_trainer.routing.message_log import MessageLog
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.transport.base import Transport
from bamboo_trainer.transport.wire import Lane, lane_of

Received = tuple[WorkerId, Frame]  # sender and frame
_DIRECT: Final = BOUNDARY | {FrameKind.TIED}  # what stages exchange within a step, from device to device


class _Leaving(NamedTuple):
    """A frame that leaves once its tensors are copied."""

    address: Address
    copy: Copy
    payload: Any
    receiver: WorkerId | None  # the worker it is for; None: it is for a cell
    is_here: bool = False  # its cell is on this worker, and already has it


class Outbox:
    """Sends frames to the workers that the plan in force names. log: frames to cells, while a worker may need them.

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
        """Connect to the workers of the plan in force, and to no others."""
        workers = self._plan.current.workers
        self._transport.peers({p.worker: (p.host, p.port) for p in workers if p.worker != self._plan.worker})

    def frame(self, address: Address, tensors: Iterable[Tensor] = (), payload: Any = None) -> Frame:
        """Return a frame to send at once, after waiting for the copy of its tensors."""
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
        """Send a frame to that worker without keeping it in the log."""
        self._leave_after(address, tensors, payload, worker)

    def is_sending(self, worker: WorkerId, lane: Lane) -> bool:
        """Return whether a frame on this lane to that worker would have to wait for another one."""
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
        """Send the frames whose tensors are copied by now."""
        for queue in self._queues:
            while queue and queue[0].copy.ready():
                self._leave(queue.popleft())

    def finish(self) -> None:
        """Send all emitted frames, waiting for their copies."""
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
        """Send a cell's logged frames again, to its receiver or to that worker, which drops duplicates.

        since: only boundary tensors, from its step and microbatch on.
        """
        self.finish()
        epoch = self._plan.current.epoch
        for frame in self.log.to(cell):
            if since and not (is_of_microbatch(frame.address) and frame.address[3:5] >= since[3:5]):
                continue
            payload = _said_again(frame.payload)
            self.send(worker or self._receiver(frame.address), replace(frame, epoch=epoch, payload=payload))


def _said_again(payload: Any) -> Any:
    """Return a frame's payload, marked as sent again."""
    if isinstance(payload, PartialSum | FrameFacts):
        return msgspec.structs.replace(payload, again=True)
    return FrameFacts(again=True) if payload is None else payload
