"""What this worker says to others on the data plane, and what it has said and may have to say again."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec
from torch import Tensor

from bamboo.job.spec import RedundancyMode
from bamboo.planning.plan import Cell, WorkerId
from bamboo_trainer.routing.message_log import MessageLog
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.transport.base import Transport
from bamboo_trainer.transport.frames import Address, Again, Frame, FrameKind
from bamboo_trainer.transport.payloads import Contributed, PartialSum


class Outbox:
    """Finds the receiver by the plan in force. log: the frames to cells, until nobody can need them again."""

    def __init__(self, plan: PlanState, transport: Transport, to_itself: Callable[[Frame], None]) -> None:
        """to_itself: takes the frames of this worker to itself, as when it owns two cells in a row."""
        self._plan, self._transport, self._to_itself = plan, transport, to_itself
        self.log = MessageLog()

    def connect(self) -> None:
        """To the workers of the plan in force, and to nobody else."""
        workers = self._plan.current.workers
        self._transport.peers({p.worker: (p.host, p.port) for p in workers if p.worker != self._plan.worker})

    def frame(self, address: Address, tensors: Iterable[Tensor] = (), payload: Any = None) -> Frame:
        """What is sent, and so the log, lives in host memory."""
        plan = self._plan.current
        return Frame(
            address=address,
            epoch=plan.epoch,
            origin=plan.origin,
            tensors=tuple(t.cpu() for t in tensors),
            payload=payload,
        )

    def emit(self, address: Address, tensors: Iterable[Tensor] = (), payload: Any = None) -> None:
        """To the owner of the cell that it is for; kept in the log.

        A gradient goes to the cell's shadow, too, if that runs backwards in advance.
        """
        frame = self.frame(address, tensors, payload)
        self.log.add(frame)
        roles = self._plan.current.at(address.cell)
        self.send(roles.owner, frame)
        mirrored = self._plan.current.mode is RedundancyMode.EAGER_BACKWARD and address.kind is FrameKind.GRADIENT
        if mirrored and roles.shadow is not None and roles.shadow != self._plan.worker:
            self.send(roles.shadow, frame)

    def send(self, worker: WorkerId, frame: Frame) -> None:
        if worker == self._plan.worker:
            self._to_itself(frame)
        else:
            self._transport.send(worker, frame)

    def resend(self, cell: Cell, worker: WorkerId | None = None) -> None:
        """All that the log has for a cell, to its owner or to that worker; what it has already, it drops."""
        epoch = self._plan.current.epoch
        for frame in self.log.to(cell):
            payload = _said_again(frame.payload)
            self.send(worker or self._plan.owner(cell), replace(frame, epoch=epoch, payload=payload))


def _said_again(payload: Any) -> Any:
    """The payload of a frame that is sent once more."""
    if isinstance(payload, Contributed | PartialSum):
        return msgspec.structs.replace(payload, again=True)
    return Again() if payload is None else payload
