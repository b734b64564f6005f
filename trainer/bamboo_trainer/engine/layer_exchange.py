"""Layers of a state that all workers hold while they are split anew: copies of one's own, and those that others give.

They are the states after one commit (a cut), in host memory. Whoever begins anew takes what it needs from its own, asks
the others for the rest, and answers those who ask.
"""

from collections.abc import Callable, Iterable, Mapping

from bamboo.control.protocol import Message, StateHeld
from bamboo.planning.plan import CheckpointId, Plan, WorkerId
from bamboo_trainer.stage.layer_state import LayerState
from bamboo_trainer.task import Parts
from bamboo_trainer.transport.base import Transport
from bamboo_trainer.transport.frames import Address, Frame, FrameKind
from bamboo_trainer.transport.payloads import HeldLayer, LayersWanted

KINDS = (FrameKind.LAYERS_WANTED, FrameKind.LAYER)


class LayerExchange:
    """checkpoint: the cut whose layers are held, if any."""

    def __init__(self, worker: WorkerId, transport: Transport, tell: Callable[[Message], None]) -> None:
        self._worker, self._transport, self._tell = worker, transport, tell
        self.checkpoint: CheckpointId | None = None
        self._origin = 0  # of the plan in which they were copied
        self._layers: dict[int, LayerState] = {}
        self._wanted: dict[int, WorkerId] = {}  # whom it was asked of

    @property
    def missing(self) -> bool:
        """Are layers on their way?"""
        return bool(self._wanted)

    @property
    def layers(self) -> Mapping[int, LayerState]:
        return self._layers

    def asked(self) -> list[WorkerId]:
        """Whose layers are on their way."""
        return sorted(set(self._wanted.values()))

    def hold(self, origin: int, checkpoint: CheckpointId, states: Mapping[int, LayerState]) -> None:
        """Keep copies of what this worker has of a cut's state, and tell the coordinator."""
        self._of(checkpoint)
        self._origin = origin
        self._layers.update(states)
        self._tell(StateHeld(checkpoint=checkpoint, layers=tuple(sorted(states))))

    def report(self) -> None:
        """To the coordinator, which may have missed it."""
        if self.checkpoint and self._layers:
            self._tell(StateHeld(checkpoint=self.checkpoint, layers=tuple(sorted(self._layers))))

    def obeyed(self, plan: Plan) -> None:
        """Others have begun as well, or begin with another state: what is held here is of no use any more."""
        if plan.origin > self._origin and not plan.sources:
            self.checkpoint, self._layers, self._wanted = None, {}, {}

    def gather(self, plan: Plan, layers: Iterable[int]) -> None:
        """Ask for those of these layers that are not here. plan: names who holds them."""
        assert plan.restore is not None
        self._of(plan.restore)
        mine = sorted(plan.worker_ids()).index(self._worker)  # so that not all ask the same one
        self._wanted = {}
        for layer in layers:
            if layer not in self._layers:
                holders = [w for w in plan.sources[layer] if w != self._worker]
                assert holders, f"the plan says that layer {layer} is here"
                self._wanted[layer] = holders[mine % len(holders)]
        for worker in self.asked():
            self._ask(worker)

    def _of(self, checkpoint: CheckpointId) -> None:
        if self.checkpoint != checkpoint:
            self.checkpoint, self._origin, self._layers, self._wanted = checkpoint, 0, {}, {}

    def relinked(self, peer: WorkerId) -> None:
        """What was on its way from that peer may be lost, or the question."""
        if peer in self._wanted.values():
            self._ask(peer)

    def _ask(self, worker: WorkerId) -> None:
        assert self.checkpoint is not None
        layers = tuple(sorted(layer for layer, of in self._wanted.items() if of == worker))
        self._send(worker, FrameKind.LAYERS_WANTED, 0, LayersWanted(checkpoint=self.checkpoint, layers=layers))

    def take(self, sender: WorkerId, frame: Frame) -> None:
        """A question, or a layer."""
        payload = frame.payload
        if payload.checkpoint != self.checkpoint:
            return
        if frame.address.kind is FrameKind.LAYERS_WANTED:
            for layer in payload.layers:
                if layer in self._layers:
                    self._give(sender, self._layers[layer])
        elif self._wanted.get(frame.address.part) == sender:
            layer = frame.address.part
            del self._wanted[layer]
            self._layers[layer] = LayerState(
                layer=layer,
                version=payload.checkpoint.step,
                tensors=dict(zip(payload.tensors, frame.tensors, strict=True)),
                scalars=payload.scalars,
                names=payload.names,
            )

    def _give(self, worker: WorkerId, state: LayerState) -> None:
        assert self.checkpoint is not None
        held = HeldLayer(
            checkpoint=self.checkpoint,
            tensors=tuple(state.tensors),
            scalars=dict(state.scalars),
            names=dict(state.names),
        )
        self._send(worker, FrameKind.LAYER, state.layer, held, tuple(state.tensors.values()))

    def _send(self, worker: WorkerId, kind: FrameKind, layer: int, payload: object, tensors: Parts = ()) -> None:
        assert self.checkpoint is not None
        address = Address(kind, 0, 0, self.checkpoint.step, part=layer)
        self._transport.send(worker, Frame(address=address, epoch=0, tensors=tensors, payload=payload))
