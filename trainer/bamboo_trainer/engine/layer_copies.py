"""Copies of layers' states in host memory: made for checkpoints and cuts, held, and taken over by stages.

**Made** piece by piece while the worker waits for others in the step after; what is not copied when the state is about
to change is copied then, and only for that training waits. **Held** are a cut's of all that is here, until the layers
are split anew, and a checkpoint's that this worker has written, until a newer one is there; of the one in writing as
long as that is not given up. **Taken over** are those that are here; the others are read from the store.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from bamboo_core.control.protocol import CopiesHeld, KeepLastState, StateHeld, WorkerWarning
from bamboo_core.planning.plan import CheckpointId, Plan, WorkerId
from bamboo_core.planning.shares import share
from bamboo_core.text import size as text_of
from bamboo_trainer.commit.coordinator import Coordinator
from bamboo_trainer.frames.payloads import CheckpointMark
from bamboo_trainer.memory.cgroup import HostMemory
from bamboo_trainer.stage.stage_states import StageStates
from bamboo_trainer.stage.state.late_copies import Copying
from bamboo_trainer.stage.state.layer_state import LayerState
from bamboo_trainer.stage.state.values import StageValues

logger = logging.getLogger(__name__)

MOST_CHECKPOINTS = 2  # the newest one, and the one that is being written
NOTHING: Mapping[int, LayerState] = {}


class CheckpointFiles(Protocol):
    """The files of checkpoints, written while training goes on."""

    def keep(self, checkpoint: CheckpointId, states: Mapping[int, LayerState], seconds: float) -> None:
        """Write these copies; training has waited for so many seconds while they were made."""

    def restore(
        self, values: StageValues, checkpoint: CheckpointId, here: Mapping[int, LayerState]
    ) -> Mapping[int, LayerState]:
        """Have the values take a checkpoint's state over; the layers that were read, as all but those here are.

        Raises RestoreError.
        """


@dataclass(slots=True)
class _Share:
    """The layers of a stage that this worker copies. seconds: for which training has waited for it."""

    checkpoint: CheckpointId
    copying: Copying
    seconds: float


class LayerCopies:
    """held: by state and layer. cut: the one of which copies are held, or will come from others."""

    def __init__(
        self,
        worker: WorkerId,
        files: CheckpointFiles,
        coordinator: Coordinator,
        clock: Callable[[], float],
        memory: Callable[[], HostMemory | None] = lambda: None,
    ) -> None:
        """coordinator: it has to know what is held. clock: seconds. memory: of the host; None if no limit
        is known.
        """
        self._worker, self._files, self._coordinator, self._clock = worker, files, coordinator, clock
        self._memory = memory
        self._warned = False
        self.cut: CheckpointId | None = None
        self._origin = 0  # of the plan in which the cut's were copied
        self.held: dict[CheckpointId, dict[int, LayerState]] = {}
        self._shares: dict[int, _Share] = {}  # by stage: those that are being copied
        self._complete: list[tuple[int, _Share]] = []  # by stage: those that are not handed over yet
        self._last: CheckpointId | None = None  # that was asked for after the last step

    # making them

    def reached(self, stage: int, values: StageValues, mark: CheckpointMark | None, plan: Plan) -> None:
        """A stage that is held here has come to another version, by itself or with another worker's state.

        mark: what the commit that leads to the version says of keeping it. plan: the one in force.
        """
        if mark is None:
            return
        state = CheckpointId(step=values.version, id=mark.id)
        self.finish(stage)  # of a state that was given up meanwhile: nothing changes it
        if mark.hold:
            self.hold(plan.origin, state, values.layer_states(shown=False))
        if stage < len(mark.writers):
            self._begin(stage, values, state, share(mark.writers[stage], self._worker, plan.stages[stage]))

    def keep_last(self, wanted: KeepLastState, states: StageStates, plan: Plan) -> bool:
        """The coordinator asks for the last state, perhaps again. False if it is not here as others think it is."""
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
        """While there is nothing else to do: copy one piece more. False if there is none."""
        stage = next(iter(self._shares), None)
        if stage is None:
            return False
        self._shares[stage].copying.copy_piece()
        self._look_whether_complete(stage)
        return True

    def finish(self, stage: int) -> None:
        """That stage's state is about to change: copy what is left of it."""
        found = self._shares.get(stage)
        if found is None:
            return
        began = self._clock()
        while not found.copying.done:
            found.copying.copy_piece()
        found.seconds += self._clock() - began
        self._look_whether_complete(stage)

    def _look_whether_complete(self, stage: int) -> None:
        if self._shares[stage].copying.done:
            self._complete.append((stage, self._shares.pop(stage)))

    def complete(self) -> list[int]:
        """The stages whose copies are made, and not handed over yet."""
        return [stage for stage, _ in self._complete]

    def hand_over(self) -> None:
        """Have all complete copies written, and keep them if there is room."""
        complete, self._complete = self._complete, []
        for _, done in complete:
            self.keep(done.checkpoint, done.copying.layers)
            self._files.keep(done.checkpoint, done.copying.layers, done.seconds)

    def forget_states(self) -> None:
        """The states of stages here are given up, and so is what was to be copied of them."""
        self._shares, self._complete, self._last = {}, [], None

    # taking them over

    def restore(self, values: StageValues, checkpoint: CheckpointId, share: Collection[int]) -> None:
        """Have values take a checkpoint's state over, from copies where they are here. share: layers of which copies of
        what is read stay here, if there is room. Raises RestoreError.
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
        """To the coordinator, which may have missed it."""
        for state, layers in self.held.items():
            self._say(state, layers)

    def obeyed(self, plan: Plan) -> None:
        """Others have begun with a cut as well, or begin with another state: what is of no use any more is dropped."""
        if plan.origin > self._origin and (not plan.sources or plan.restore != self.cut):
            self._forget_cut()

    def goes_back(self, plan: Plan) -> None:
        """All begin with the state of that plan: if it is a checkpoint, others are of no use any more."""
        if not plan.moved:
            self.drop([one for one in self.held if one not in (plan.restore, self.cut)])

    # of a cut

    def hold(self, origin: int, cut: CheckpointId, states: Mapping[int, LayerState]) -> None:
        """Keep copies of what this worker has of a cut's state, and tell the coordinator."""
        if cut != self.cut:
            self._forget_cut()
        self.cut, self._origin = cut, origin
        self.held.setdefault(cut, {}).update(states)
        self._say(cut, states)

    def _forget_cut(self) -> None:
        if self.cut is not None:
            self.held.pop(self.cut, None)
        self.cut, self._origin = None, 0

    # of checkpoints

    def keep(self, checkpoint: CheckpointId, states: Mapping[int, LayerState]) -> None:
        """Keep copies of what this worker writes of a checkpoint if there is room, and tell the coordinator."""
        if not self.has_room(checkpoint, states.values()):
            return
        self.held.setdefault(checkpoint, {}).update(states)
        others = sorted(one for one in self.held if one not in (self.cut, checkpoint))
        self.drop(others[: 1 - MOST_CHECKPOINTS])  # of one step there may be several attempts, in any order
        self._say(checkpoint, self.held[checkpoint])

    def has_room(self, checkpoint: CheckpointId, states: Collection[LayerState]) -> bool:
        """May these copies stay, and as many be made for the next checkpoint before they go? If not, that is said once.

        They are there already, to be written or for a stage that begins with them. Those of other checkpoints will go.
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
        """Drop all copies for that checkpoint but those of these layers, and tell the coordinator which are left."""
        if checkpoint in self.held:
            left = {layer: state for layer, state in self.held[checkpoint].items() if layer in layers}
            self.held[checkpoint] = left
            self._say(checkpoint, left)

    def drop(self, checkpoints: Collection[CheckpointId]) -> None:
        """They are of no use any more."""
        for checkpoint in checkpoints:
            self.held.pop(checkpoint, None)

    # layers of others

    def add(self, state: CheckpointId, layer: LayerState) -> None:
        """One that has come from another worker, or from the store."""
        self.held.setdefault(state, {})[layer.layer] = layer

    def begins_with(self, state: CheckpointId) -> None:
        """Layers of that cut will come: what is here of another one is of no use any more."""
        if state != self.cut:
            self._forget_cut()
            self.cut = state

    def _say(self, state: CheckpointId, layers: Collection[int]) -> None:
        told = tuple(sorted(layers))
        if state != self.cut:
            self._coordinator.tell(CopiesHeld(checkpoint=state, layers=told))
        elif told:
            self._coordinator.tell(StateHeld(checkpoint=state, layers=told))


def _bytes(states: Iterable[LayerState]) -> int:
    return sum(tensor.nbytes for state in states for tensor in state.tensors.values())
