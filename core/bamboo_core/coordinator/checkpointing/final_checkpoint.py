"""A complete job has its last state in the store: in that of its checkpoints, or in one for the last state alone.

Usually the commit of the last step is marked as that of any other checkpoint. That cannot be if the one before is still
being written two steps before the end, or if the root hears the wish too late, and such a checkpoint may be given up.
Then those who have finished the stages, and keep them until they are told to leave, are asked for their states.
"""

from hashlib import sha256

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control import protocol
from bamboo_core.coordinator.checkpoint_counts import AbandonReason
from bamboo_core.coordinator.checkpointing.checkpoints import AGAIN_SECONDS, MOST_WRITERS
from bamboo_core.coordinator.checkpointing.record import MOST_FAILURES
from bamboo_core.coordinator.events import Emit, Send
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.planning.plan import WorkerId
from bamboo_core.planning.shares import share


def begin(turn: Turn) -> bool:
    """Begin a checkpoint of the last state once all have finished; return False if the state is kept already, or given
    up.
    """
    state, c, plan = turn.state, turn.state.checkpoints, turn.state.plan
    if plan is None or not is_missing(state) or c.final_failures >= MOST_FAILURES:
        return False
    steps, writers = state.spec.training.steps, _finishers(state)
    if not all(writers):
        counts = c.counts.abandoning(AbandonReason.WRITER_LOST)
        turn.put(replace(c, final_failures=MOST_FAILURES, counts=counts, writers=(), retry=False))
        text = f"the state of step {steps} gets no checkpoint: stage {writers.index(())} ended on workers that are gone"
        turn.do(Emit("CheckpointAbandoned", text, True))
        return False
    dealt = {
        layer: worker
        for stage, mine in enumerate(writers)
        for worker in mine
        for layer in share(mine, worker, plan.stages[stage])
    }
    wished = c.wished(steps, writers, dealt, turn.now)
    attempt = sha256(f"{state.terms.secret} {wished.number} last".encode()).hexdigest()[:12]
    turn.put(replace(wished, parts={}, writing=CheckpointId(step=steps, id=attempt), final=True))
    _ask(turn)
    return True


def is_missing(state: CoordinatorState) -> bool:
    """Return whether the job keeps checkpoints and none of its last state is known."""
    return (state.spec.checkpoint is not None or state.terms.last_state != "") and known(state) is None


def known(state: CoordinatorState) -> CheckpointId | None:
    """Return the checkpoint of the last state, if there is one."""
    steps, begun = state.spec.training.steps, state.plan.restore if state.plan else None
    return next((one for one in (*state.checkpoints.kept, begun) if one is not None and one.step >= steps), None)


def look_after(turn: Turn) -> None:
    """Ask the writers again while parts are missing, since a message may have been lost."""
    c = turn.state.checkpoints
    if c.final and c.writing and c.dealt.keys() - c.parts.keys() and turn.now - c.asked_at > AGAIN_SECONDS:
        _ask(turn)


def _ask(turn: Turn) -> None:
    c = turn.state.checkpoints
    assert c.writing is not None
    message = protocol.KeepLastState(checkpoint=c.writing, writers=c.writers)
    left = dict.fromkeys(writer for layer, writer in c.dealt.items() if layer not in c.parts)
    turn.put(replace(c, asked=None, asked_at=turn.now))
    turn.do(*(Send(worker, message) for worker in left if worker in turn.state.workers))


def _finishers(state: CoordinatorState) -> tuple[tuple[WorkerId, ...], ...]:
    """Return the connected workers that finished each stage, without those under notice unless all of them are."""
    found = []
    plan = state.current_plan
    for number in range(len(plan.stages)):
        named = dict.fromkeys(w for cell, w in sorted(state.ending.finishers.items()) if cell.stage == number)
        present = [w for w in named if w in state.workers and not state.workers[w].released]
        staying = [w for w in present if state.stays(w)]
        found.append(tuple((staying or present)[:MOST_WRITERS]))
    return tuple(found)
