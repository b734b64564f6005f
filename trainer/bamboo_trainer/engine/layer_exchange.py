"""Exchanges layers of the state that all workers begin anew with: asks workers that have copies, and answers them.

The state is that of a cut, or of a checkpoint. Some worker has each layer of a cut; layers of a checkpoint that no
worker has, or has any more when asked, are read from the store.
"""

from collections.abc import Iterable

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.planning.plan import Plan, WorkerId
from bamboo_trainer.engine.layer_copies import LayerCopies
from bamboo_trainer.frames.frame import NO_CELL, Address, Frame, FrameKind
from bamboo_trainer.frames.payloads import LayerPayload, LayersWanted
from bamboo_trainer.stage.state.layer_state import LayerState
from bamboo_trainer.task import Parts
from bamboo_trainer.transport.base import Transport

_ABOUT = (FrameKind.LAYERS_WANTED, FrameKind.LAYERS_LACKED)


def is_exchanged(address: Address) -> bool:
    """Return whether a frame is a question for layers, or belongs to an answer."""
    return address.kind in _ABOUT or (address.kind is FrameKind.LAYER and address.pipeline == NO_CELL)


class LayerExchange:
    """Requests and answers of layers. copies: those of this worker; received layers are added."""

    def __init__(self, worker: WorkerId, transport: Transport, copies: LayerCopies) -> None:
        self._worker, self._transport, self._copies = worker, transport, copies
        self._wanted: dict[int, WorkerId] = {}  # the worker that was asked
        self._plan: Plan | None = None  # the plan whose state's layers are wanted

    @property
    def missing(self) -> bool:
        """Whether layers are on their way."""
        return bool(self._wanted)

    def asked(self) -> list[WorkerId]:
        """Return the workers whose layers are on their way."""
        return sorted(set(self._wanted.values()))

    def gather(self, plan: Plan, layers: Iterable[int]) -> None:
        """Ask for those of these layers that are missing here and that others hold according to the plan."""
        assert plan.restore is not None
        mine = sorted(plan.worker_ids()).index(self._worker)  # so that not all workers ask the same one
        here = self._copies.of(plan.restore)
        self._plan, self._wanted = plan, {}
        for layer in layers:
            holders = [w for w in plan.sources[layer] if w != self._worker]
            assert layer in here or holders or not plan.moved, f"the plan says that layer {layer} is here"
            if layer not in here and holders:
                self._wanted[layer] = holders[mine % len(holders)]
        for worker in self.asked():
            self._ask(worker, plan.restore)

    def stop(self) -> None:
        """Stop waiting for layers."""
        self._plan, self._wanted = None, {}

    def relinked(self, peer: WorkerId) -> None:
        """Ask a peer again, as the question or the answer may be lost."""
        if self._plan and self._plan.restore and peer in self._wanted.values():
            self._ask(peer, self._plan.restore)

    def _ask(self, worker: WorkerId, checkpoint: CheckpointId) -> None:
        layers = tuple(sorted(layer for layer, of in self._wanted.items() if of == worker))
        wanted = LayersWanted(checkpoint=checkpoint, layers=layers)
        self._send(worker, FrameKind.LAYERS_WANTED, checkpoint, wanted)

    def take(self, sender: WorkerId, frame: Frame) -> None:
        """Take in a question, or an answer."""
        payload, layer = frame.payload, frame.address.part
        if frame.address.kind is FrameKind.LAYERS_WANTED:
            self._answer(sender, payload)
        elif self._plan is None or payload.checkpoint != self._plan.restore:
            return
        elif frame.address.kind is FrameKind.LAYERS_LACKED:
            if not self._plan.moved:  # else another plan follows, or no worker has them
                self._wanted = {k: w for k, w in self._wanted.items() if (w, k in payload.layers) != (sender, True)}
        elif self._wanted.get(layer) == sender:
            del self._wanted[layer]
            self._copies.add(payload.checkpoint, LayerState.of(frame))

    def _answer(self, worker: WorkerId, wanted: LayersWanted) -> None:
        here = self._copies.of(wanted.checkpoint)
        for layer in wanted.layers:
            if layer in here:
                self._give(worker, wanted.checkpoint, here[layer])
        if lacked := tuple(layer for layer in wanted.layers if layer not in here):
            reply = LayersWanted(checkpoint=wanted.checkpoint, layers=lacked)
            self._send(worker, FrameKind.LAYERS_LACKED, wanted.checkpoint, reply)

    def _give(self, worker: WorkerId, checkpoint: CheckpointId, state: LayerState) -> None:
        payload = state.payload(checkpoint=checkpoint)
        self._send(worker, FrameKind.LAYER, checkpoint, payload, state.layer, tuple(state.tensors.values()))

    def _send(
        self,
        worker: WorkerId,
        kind: FrameKind,
        of: CheckpointId,
        payload: LayerPayload | LayersWanted,
        layer: int = 0,
        tensors: Parts = (),
    ) -> None:
        address = Address(kind, NO_CELL, NO_CELL, of.step, part=layer)
        self._transport.send(worker, Frame(address=address, epoch=0, tensors=tensors, payload=payload))
