"""Copies of layers in host memory: of a cut's state, and of the job's newest checkpoints.

A cut's are those of all that is held here, until the layers are split anew. A checkpoint's are those that this worker
has written, until a newer one is there; of the one in writing as long as that is not given up.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from torch import Tensor

from bamboo.control.protocol import CopiesHeld, Message, StateHeld, WorkerWarning
from bamboo.planning.plan import CheckpointId, Plan
from bamboo.text import size as text_of
from bamboo_trainer.memory.cgroup import HostMemory
from bamboo_trainer.stage.state.layer_state import LayerState

logger = logging.getLogger(__name__)

MOST_CHECKPOINTS = 2  # the newest one, and the one that is being written
NOTHING: Mapping[int, LayerState] = {}


class LayerCopies:
    """tell: to the coordinator, which has to know what is held. memory: of the host; None if no limit is known."""

    def __init__(self, tell: Callable[[Message], None], memory: Callable[[], HostMemory | None] = lambda: None) -> None:
        self._tell, self._memory = tell, memory
        self._warned = False
        self._cut: CheckpointId | None = None
        self._origin = 0  # of the plan in which the cut's were copied
        self._held: dict[CheckpointId, dict[int, LayerState]] = {}

    def of(self, state: CheckpointId) -> Mapping[int, LayerState]:
        return self._held.get(state, NOTHING)

    def tensors(self) -> Iterator[Tensor]:
        """Of all copies."""
        for layers in self._held.values():
            for state in layers.values():
                yield from state.tensors.values()

    def report(self) -> None:
        """To the coordinator, which may have missed it."""
        for state, layers in self._held.items():
            self._say(state, layers)

    def obeyed(self, plan: Plan) -> None:
        """Others have begun with a cut as well, or begin with another state: what is of no use any more is dropped."""
        if plan.origin > self._origin and (not plan.sources or plan.restore != self._cut):
            self._forget_cut()

    def goes_back(self, plan: Plan) -> None:
        """All begin with the state of that plan: if it is a checkpoint, others are of no use any more."""
        if not plan.moved:
            self.drop([one for one in self._held if one not in (plan.restore, self._cut)])

    # of a cut

    def hold(self, origin: int, cut: CheckpointId, states: Mapping[int, LayerState]) -> None:
        """Keep copies of what this worker has of a cut's state, and tell the coordinator."""
        if cut != self._cut:
            self._forget_cut()
        self._cut, self._origin = cut, origin
        self._held.setdefault(cut, {}).update(states)
        self._say(cut, states)

    def _forget_cut(self) -> None:
        if self._cut is not None:
            self._held.pop(self._cut, None)
        self._cut, self._origin = None, 0

    # of checkpoints

    def keep(self, checkpoint: CheckpointId, states: Mapping[int, LayerState]) -> None:
        """Keep copies of what this worker writes of a checkpoint if there is room, and tell the coordinator."""
        if not self.has_room(checkpoint, states.values()):
            return
        self._held.setdefault(checkpoint, {}).update(states)
        others = sorted(one for one in self._held if one not in (self._cut, checkpoint))
        self.drop(others[: 1 - MOST_CHECKPOINTS])  # of one step there may be several attempts, in any order
        self._say(checkpoint, self._held[checkpoint])

    def has_room(self, checkpoint: CheckpointId, states: Collection[LayerState]) -> bool:
        """May these copies stay, and as many be made for the next checkpoint before they go? If not, that is said once.

        They are there already, to be written or for a stage that begins with them. Those of other checkpoints will go.
        """
        memory = self._memory()
        if memory is None:
            return True
        size = _bytes(states) + _bytes(self.of(checkpoint).values())
        others = sum(_bytes(held.values()) for one, held in self._held.items() if one not in (checkpoint, self._cut))
        enough = memory.has_room(size, others)
        if not enough and not self._warned:
            self._warned = True
            text = (
                f"copies of {text_of(size)} of the checkpoint of step {checkpoint.step} are not kept in memory: "
                f"{text_of(memory.used)} of {text_of(memory.limit)} are used, and the next one takes as much again"
            )
            logger.warning(text)
            self._tell(WorkerWarning(reason="CopiesNotKept", message=text))
        return enough

    def keep_only(self, checkpoint: CheckpointId, layers: Collection[int]) -> None:
        """Of that checkpoint, these of the layers that are here, and tell the coordinator."""
        if checkpoint in self._held:
            left = {layer: state for layer, state in self._held[checkpoint].items() if layer in layers}
            self._held[checkpoint] = left
            self._say(checkpoint, left)

    def drop(self, checkpoints: Collection[CheckpointId]) -> None:
        """They are of no use any more."""
        for checkpoint in checkpoints:
            self._held.pop(checkpoint, None)

    # layers of others

    def add(self, state: CheckpointId, layer: LayerState) -> None:
        """One that has come from another worker, or from the store."""
        self._held.setdefault(state, {})[layer.layer] = layer

    def begins_with(self, state: CheckpointId) -> None:
        """Layers of that cut will come: what is here of another one is of no use any more."""
        if state != self._cut:
            self._forget_cut()
            self._cut = state

    def _say(self, state: CheckpointId, layers: Collection[int]) -> None:
        told = tuple(sorted(layers))
        if state != self._cut:
            self._tell(CopiesHeld(checkpoint=state, layers=told))
        elif told:
            self._tell(StateHeld(checkpoint=state, layers=told))


def _bytes(states: Iterable[LayerState]) -> int:
    return sum(tensor.nbytes for state in states for tensor in state.tensors.values())
