"""Copies of checkpoints' layers in workers' host memory, so that a restore need not read these layers from storage.

Workers report their copies (CopiesHeld), and the coordinator tells them which ones to drop (DropCopies). A plan that
goes back to a checkpoint names the holders of each layer's copies; see docs/design/checkpoints.md.
"""

from collections.abc import Mapping

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control import protocol
from bamboo_core.coordinator.events import Send
from bamboo_core.coordinator.records.checkpoints import MOST_COPIED
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.planning.plan import Peer, WorkerId
from bamboo_core.planning.splits.resplit_plans import Sources, holders_of


def copies_held(turn: Turn, worker: WorkerId, message: protocol.CopiesHeld) -> None:
    """Record a worker's copies of layers, if the job keeps checkpoints and the model is known to have these layers."""
    state = turn.state
    layers = (
        len(state.layers.costs) if state.layers.costs is not None else state.plan.stages[-1][1] if state.plan else None
    )
    if state.spec.checkpoint is None or layers is None or any(layer >= layers for layer in message.layers):
        return
    known, one = state.copies.held, message.checkpoint
    held = {**known.get(one, {}), worker: frozenset(message.layers)}
    others = [(other, who) for other, who in known.items() if other != one]
    turn.put(replace(state.copies, held=dict([*others[1 - MOST_COPIED :], (one, held)])))


def committed(turn: Turn, newest: CheckpointId) -> None:
    """Tell workers to drop their known copies of all checkpoints but `newest`, which is now committed."""
    _drop(turn, tuple(one for one in turn.state.copies.held if one != newest))


def given_up(turn: Turn, checkpoint: CheckpointId | None) -> None:
    """Tell writers and holders of an abandoned checkpoint to drop its copies and unfinished files; None: do nothing."""
    if checkpoint is not None:
        _drop(turn, (checkpoint,), frozenset(turn.state.checkpoints.dealt.values()))


def _drop(turn: Turn, useless: tuple[CheckpointId, ...], others: frozenset[WorkerId] = frozenset()) -> None:
    copies = turn.state.copies.held
    holders = others.union(*(copies.get(one, {}) for one in useless))
    message = protocol.DropCopies(checkpoints=useless)
    turn.do(*(Send(w, message) for w in turn.state.workers if w in holders))
    turn.put(turn.state.copies.without(useless))


def begun(turn: Turn, checkpoint: CheckpointId | None) -> None:
    """Forget all copies but those of `checkpoint`, with which a plan begins; workers drop the forgotten ones, too."""
    turn.put(turn.state.copies.without([one for one in turn.state.copies.held if one != checkpoint]))


def sources(
    state: CoordinatorState, checkpoint: CheckpointId | None, layers: int, live: Mapping[WorkerId, Peer]
) -> Sources:
    """Return, for each layer, some of the `live` workers with a copy of it in `checkpoint`; () if no layer has any.

    layers: the model's number of layers.
    """
    held = state.copies.held.get(checkpoint, {}) if checkpoint else {}
    holders = holders_of(held, layers, live)
    return holders if any(holders) else ()
