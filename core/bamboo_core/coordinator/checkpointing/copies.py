"""Who has copies of a checkpoint's layers in host memory: a job that goes back to it reads only what is lacking.

Workers say what they keep (CopiesHeld), and are told of what use it is no more (DropCopies). A plan that goes back to a
checkpoint names who has which layer; see docs/design/checkpoints.md.
"""

from collections.abc import Mapping

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control import protocol
from bamboo_core.coordinator.checkpointing.record import MOST_COPIED
from bamboo_core.coordinator.events import Send
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.planning.plan import Peer, WorkerId
from bamboo_core.planning.splits.resplit import Sources, holders_of


def copies_held(turn: Turn, worker: WorkerId, message: protocol.CopiesHeld) -> None:
    """A worker keeps copies of these layers, instead of what it has said of that checkpoint before."""
    state = turn.state
    layers = (
        len(state.profile.costs)
        if state.profile.costs is not None
        else state.plan.stages[-1][1]
        if state.plan
        else None
    )
    if state.spec.checkpoint is None or layers is None or any(layer >= layers for layer in message.layers):
        return
    known, one = state.copies.held, message.checkpoint
    held = {**known.get(one, {}), worker: frozenset(message.layers)}
    others = [(other, who) for other, who in known.items() if other != one]
    turn.put(replace(state.copies, held=dict([*others[1 - MOST_COPIED :], (one, held)])))


def committed(turn: Turn, newest: CheckpointId) -> None:
    """There is a newer checkpoint than those that copies were of use for."""
    _drop(turn, tuple(one for one in turn.state.copies.held if one != newest))


def given_up(turn: Turn, checkpoint: CheckpointId | None) -> None:
    """That checkpoint will not be one. Its writers stop, too, and remove what they have written of it."""
    if checkpoint is not None:
        _drop(turn, (checkpoint,), frozenset(turn.state.checkpoints.dealt.values()))


def _drop(turn: Turn, useless: tuple[CheckpointId, ...], others: frozenset[WorkerId] = frozenset()) -> None:
    copies = turn.state.copies.held
    holders = others.union(*(copies.get(one, {}) for one in useless))
    message = protocol.DropCopies(checkpoints=useless)
    turn.do(*(Send(w, message) for w in turn.state.workers if w in holders))
    turn.put(turn.state.copies.without(useless))


def begun(turn: Turn, checkpoint: CheckpointId | None) -> None:
    """All workers go back to that one, and keep copies of no other."""
    turn.put(turn.state.copies.without([one for one in turn.state.copies.held if one != checkpoint]))


def sources(
    state: CoordinatorState, checkpoint: CheckpointId | None, layers: int, live: Mapping[WorkerId, Peer]
) -> Sources:
    """Who of these workers has a copy of each of a checkpoint's layers; empty if nobody has one of any."""
    held = state.copies.held.get(checkpoint, {}) if checkpoint else {}
    found = holders_of(held, layers, live)
    return found if any(found) else ()
