"""Copies of layers' states in host memory for checkpoints and cuts (states at which the layers are split anew).

A checkpoint's copies are made piece by piece while the worker waits for others in the next step. Training waits only
for tensors copied at once (see `LateCopies`), and for pieces left when the state is about to change. The copies are
held, if memory suffices, for at most MOST_CHECKPOINTS checkpoints. A cut's copies are made at once, and held until all
workers have begun with the new split, or the cut is given up. Layers held here are restored from these copies.

When all workers begin anew with the state of a cut or a checkpoint, `LayerExchange` requests layers that are missing
here from workers that hold copies, and answers such requests. The plan names a holder of each layer of a cut. A layer
of a checkpoint is read from the store if the plan names no holder, or if the holder no longer has it when asked.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control.protocol import CopiesHeld, KeepLastState, StateHeld, WorkerWarning
from bamboo_core.planning.plan import Plan, WorkerId
from bamboo_core.planning.shares import share
from bamboo_core.text import size as text_of
from bamboo_trainer.commit.ports import Coordinator
from bamboo_trainer.frames import NO_CELL, Address, CheckpointMark, Frame, FrameKind, LayerPayload, LayersWanted
from bamboo_trainer.memory.limits import HostMemory
from bamboo_trainer.stage.layer_state import LateCopies, LayerState
from bamboo_trainer.stage.stage_states import StageStates
from bamboo_trainer.stage.values import StageValues
from bamboo_trainer.task import Parts
from bamboo_trainer.transport.base import Transport

logger = logging.getLogger(__name__)

MOST_CHECKPOINTS = 2  # the newest one, and the one that is being written
NOTHING: Mapping[int, LayerState] = {}


class CheckpointFiles(Protocol):
    """The files of checkpoints, written while training continues."""

    def keep(self, checkpoint: CheckpointId, states: Mapping[int, LayerState], seconds: float) -> None:
        """Queue these copies for writing into the checkpoint. seconds: how long training waited for the copies."""

    def restore(
        self, values: StageValues, checkpoint: CheckpointId, here: Mapping[int, LayerState]
    ) -> Mapping[int, LayerState]:
        """Restore a stage's values from a checkpoint; return the states of the layers read from the store. here: states
        in memory, which are not read. Raises RestoreError.
        """


@dataclass(slots=True)
class _Share:
    """The layers of a stage that this worker copies for a checkpoint. seconds: how long training waited for them."""

    checkpoint: CheckpointId
    copying: LateCopies
    seconds: float


class LayerCopies:
    """The copies of layers' states in host memory, made here, received or read from the store.

    held: the complete copies, by state and layer. cut: the cut whose copies are held, or will come from other workers.
    """

    def __init__(
        self,
        worker: WorkerId,
        files: CheckpointFiles,
        coordinator: Coordinator,
        clock: Callable[[], float],
        memory: Callable[[], HostMemory | None] = lambda: None,
    ) -> None:
        """Begin without copies. coordinator: gets reports on held layers. clock: returns the time in seconds. memory:
        returns the host's memory, or None if no limit is known.
        """
        self._worker, self._files, self._coordinator, self._clock = worker, files, coordinator, clock
        self._memory = memory
        self._warned = False
        self.cut: CheckpointId | None = None
        self._origin = 0  # of the plan in which the cut's copies were made
        self.held: dict[CheckpointId, dict[int, LayerState]] = {}
        self._shares: dict[int, _Share] = {}  # by stage: being copied
        self._complete: list[tuple[int, _Share]] = []  # by stage: not handed over yet
        self._last: CheckpointId | None = None  # requested after the last step

    # making them

    def reached(self, stage: int, values: StageValues, mark: CheckpointMark | None, plan: Plan) -> None:
        """Start to copy a stage's new state for a checkpoint, if this worker writes a part of that stage.

        mark: the checkpoint in the commit that led to the state; None: no checkpoint. plan: the one in force.
        """
        if mark is None:
            return
        state = CheckpointId(step=values.version, id=mark.id)
        self.finish(stage)  # copies of an earlier state that this worker dropped may be unfinished
        if stage < len(mark.writers):
            self._begin(stage, values, state, share(mark.writers[stage], self._worker, plan.stages[stage]))

    def keep_last(self, wanted: KeepLastState, states: StageStates, plan: Plan) -> bool:
        """Start to copy this worker's part of the last state, once for a checkpoint. Return False if it is not here."""
        if wanted.checkpoint == self._last:
            return True
        mine = [stage for stage, named in enumerate(wanted.writers) if self._worker in named]
        held = {stage: values for stage in mine if (values := states.here(stage)) is not None}
        if any(stage not in held or held[stage].version != wanted.checkpoint.step for stage in mine):
            return False
        self._last = wanted.checkpoint
        for stage in mine:
            self.finish(stage)
            layers = share(wanted.writers[stage], self._worker, plan.stages[stage])
            self._begin(stage, held[stage], wanted.checkpoint, layers)
        return True

    def _begin(self, stage: int, values: StageValues, checkpoint: CheckpointId, layers: Collection[int]) -> None:
        assert stage not in self._shares
        if layers:
            began = self._clock()
            copying = values.late_copies(layers)
            self._shares[stage] = _Share(checkpoint, copying, self._clock() - began)
            self._look_whether_complete(stage)

    def advance(self) -> bool:
        """Copy one more piece of a stage's state. Return False if none is left."""
        stage = next(iter(self._shares), None)
        if stage is None:
            return False
        self._shares[stage].copying.copy_piece()
        self._look_whether_complete(stage)
        return True

    def finish(self, stage: int) -> None:
        """Copy all remaining pieces of a stage's state now, as before the state changes."""
        copied = self._shares.get(stage)
        if copied is None:
            return
        began = self._clock()
        while not copied.copying.done:
            copied.copying.copy_piece()
        copied.seconds += self._clock() - began
        self._look_whether_complete(stage)

    def _look_whether_complete(self, stage: int) -> None:
        if self._shares[stage].copying.done:
            self._complete.append((stage, self._shares.pop(stage)))

    def complete(self) -> list[int]:
        """Return the stages whose copies are made, and not handed over yet."""
        return [stage for stage, _ in self._complete]

    def hand_over(self) -> None:
        """Hand all complete copies to the checkpoint writer, and hold them here if there is room."""
        complete, self._complete = self._complete, []
        for _, done in complete:
            self.keep(done.checkpoint, done.copying.layers)
            self._files.keep(done.checkpoint, done.copying.layers, done.seconds)

    def forget_states(self) -> None:
        """Drop the copies that have not been handed to the checkpoint writer, finished or not, when this worker gives
        up its stages' states. Copies in `held` stay.
        """
        self._shares, self._complete, self._last = {}, [], None

    # restoring from them

    def restore(self, values: StageValues, checkpoint: CheckpointId, share: Collection[int]) -> None:
        """Restore a stage's values to a checkpoint: layers held here from their copies, other layers from the store.
        share: layers to hold after they are read, if there is room for all of them. Raises RestoreError.
        """
        read = self._files.restore(values, checkpoint, self.of(checkpoint))
        kept = sorted(read.keys() & share)
        if kept and self.has_room(checkpoint, [read[layer] for layer in kept]):
            for layer in kept:
                self.add(checkpoint, read[layer])

    # holding them

    def of(self, state: CheckpointId) -> Mapping[int, LayerState]:
        return self.held.get(state, NOTHING)

    def report(self) -> None:
        """Report all held copies to the coordinator again."""
        for state, layers in self.held.items():
            self._say(state, layers)

    def obeyed(self, plan: Plan) -> None:
        """Drop the cut's copies if a plan of a newer origin than theirs restores another state or has no `sources`."""
        if plan.origin > self._origin and (not plan.sources or plan.restore != self.cut):
            self._forget_cut()

    def goes_back(self, plan: Plan) -> None:
        """Drop the copies of checkpoints that the plan does not restore, unless all workers begin anew with a cut."""
        if not plan.moved:
            self.drop([one for one in self.held if one not in (plan.restore, self.cut)])

    # of a cut

    def hold(self, origin: int, cut: CheckpointId, states: Mapping[int, LayerState]) -> None:
        """Hold this worker's copies of a cut's layers, and tell the coordinator. origin: the origin of the plan."""
        if cut != self.cut:
            self._forget_cut()
        self.cut, self._origin = cut, origin
        self.held.setdefault(cut, {}).update(states)
        self._say(cut, states)

    def committed(self, origin: int, step: int) -> None:
        """Drop the cut's copies if the step after the cut is committed in their origin: then the old split stays."""
        if self.cut is not None and (self._origin, self.cut.step) == (origin, step):
            self._forget_cut()

    def _forget_cut(self) -> None:
        if self.cut is not None:
            self.held.pop(self.cut, None)
        self.cut, self._origin = None, 0

    # of checkpoints

    def keep(self, checkpoint: CheckpointId, states: Mapping[int, LayerState]) -> None:
        """Hold and report a checkpoint's copies, if memory suffices; drop the oldest others beyond MOST_CHECKPOINTS."""
        if not self.has_room(checkpoint, states.values()):
            return
        self.held.setdefault(checkpoint, {}).update(states)
        others = sorted(one for one in self.held if one not in (self.cut, checkpoint))
        self.drop(others[: 1 - MOST_CHECKPOINTS])  # of one step there may be several attempts, in any order
        self._say(checkpoint, self.held[checkpoint])

    def has_room(self, checkpoint: CheckpointId, states: Collection[LayerState]) -> bool:
        """Return whether memory suffices for these copies and the next checkpoint's, equally large; if not, warn once.

        True if no limit is known. These copies exist already, to be written or for a stage that begins with them.
        Copies of other checkpoints do not count, because they will be dropped.
        """
        memory = self._memory()
        if memory is None:
            return True
        size = _bytes(states) + _bytes(self.of(checkpoint).values())
        others = sum(_bytes(held.values()) for one, held in self.held.items() if one not in (checkpoint, self.cut))
        enough = memory.has_room(size, others)
        if not enough and not self._warned:
            self._warned = True
            text = (
                f"copies of {text_of(size)} of the checkpoint of step {checkpoint.step} are not kept in memory: "
                f"{text_of(memory.used)} of {text_of(memory.limit)} are used, and the next one takes as much again"
            )
            logger.warning(text)
            self._coordinator.tell(WorkerWarning(reason="CopiesNotKept", message=text))
        return enough

    def keep_only(self, checkpoint: CheckpointId, layers: Collection[int]) -> None:
        """Drop a checkpoint's copies of all layers but these, and tell the coordinator which copies are left."""
        if checkpoint in self.held:
            left = {layer: state for layer, state in self.held[checkpoint].items() if layer in layers}
            self.held[checkpoint] = left
            self._say(checkpoint, left)

    def drop(self, checkpoints: Collection[CheckpointId]) -> None:
        for checkpoint in checkpoints:
            self.held.pop(checkpoint, None)

    # layers of others

    def add(self, state: CheckpointId, layer: LayerState) -> None:
        """Add a layer from another worker, or from the store."""
        self.held.setdefault(state, {})[layer.layer] = layer

    def begins_with(self, state: CheckpointId) -> None:
        """Expect other workers' copies of a cut, and drop the copies of another cut."""
        if state != self.cut:
            self._forget_cut()
            self.cut = state

    def _say(self, state: CheckpointId, layers: Collection[int]) -> None:
        held = tuple(sorted(layers))
        if state != self.cut:
            self._coordinator.tell(CopiesHeld(checkpoint=state, layers=held))
        elif held:
            self._coordinator.tell(StateHeld(checkpoint=state, layers=held))


def _bytes(states: Iterable[LayerState]) -> int:
    return sum(tensor.nbytes for state in states for tensor in state.tensors.values())


_ABOUT = (FrameKind.LAYERS_WANTED, FrameKind.LAYERS_LACKED)


def is_exchanged(address: Address) -> bool:
    """Return whether a frame belongs to `LayerExchange`: a request for layers, or a part of an answer."""
    return address.kind in _ABOUT or (address.kind is FrameKind.LAYER and address.pipeline == NO_CELL)


class LayerExchange:
    """The exchange of layers' copies when workers begin anew. copies: holds the layers that are sent or received."""

    def __init__(self, worker: WorkerId, transport: Transport, copies: LayerCopies) -> None:
        self._worker, self._transport, self._copies = worker, transport, copies
        self._wanted: dict[int, WorkerId] = {}  # the worker that was asked
        self._plan: Plan | None = None  # the plan whose state's layers are wanted

    @property
    def missing(self) -> bool:
        """Whether this worker still waits for layers that it asked another worker for."""
        return bool(self._wanted)

    def asked(self) -> list[WorkerId]:
        """Return the workers that were asked for layers and still owe some."""
        return sorted(set(self._wanted.values()))

    def gather(self, plan: Plan, layers: Iterable[int]) -> None:
        """Ask for needed layers that are missing here and that other workers hold according to the plan."""
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
        """After a broken link to a peer, ask it again for the layers that it has not sent; its answer may be lost."""
        if self._plan and self._plan.restore and peer in self._wanted.values():
            self._ask(peer, self._plan.restore)

    def _ask(self, worker: WorkerId, checkpoint: CheckpointId) -> None:
        layers = tuple(sorted(layer for layer, of in self._wanted.items() if of == worker))
        wanted = LayersWanted(checkpoint=checkpoint, layers=layers)
        self._send(worker, FrameKind.LAYERS_WANTED, checkpoint, wanted)

    def take(self, sender: WorkerId, frame: Frame) -> None:
        """Process a request for layers, or a part of an answer."""
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
        for layer in (layer for layer in wanted.layers if layer in here):
            payload = here[layer].payload(checkpoint=wanted.checkpoint)
            tensors = tuple(here[layer].tensors.values())
            self._send(worker, FrameKind.LAYER, wanted.checkpoint, payload, layer, tensors)
        if lacked := tuple(layer for layer in wanted.layers if layer not in here):
            reply = LayersWanted(checkpoint=wanted.checkpoint, layers=lacked)
            self._send(worker, FrameKind.LAYERS_LACKED, wanted.checkpoint, reply)

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
