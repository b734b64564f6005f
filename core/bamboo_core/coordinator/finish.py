"""The completion of a job that has done all its steps.

The last state goes to the job's checkpoint store, or to a store for this state alone, if the job has either. Usually
the root begins the last checkpoint with the last commit. It does not if another checkpoint is being written until the
end, or if the request comes too late. Then, or if the checkpoint is abandoned, or if the job keeps only this state, the
coordinator asks the workers that finished the stages to write the state, which they hold until they stop.
"""

from hashlib import sha256

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control import protocol
from bamboo_core.coordinator.checkpointing import saving
from bamboo_core.coordinator.checkpointing.saving import AGAIN_SECONDS, MOST_WRITERS
from bamboo_core.coordinator.events import AbandonReason, Emit, Outcome, Send
from bamboo_core.coordinator.records.checkpoints import MOST_FAILURES
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.job.status import EARLY_STOPPED
from bamboo_core.planning.plan import WorkerId
from bamboo_core.text import count


def finish_if_done(turn: Turn) -> None:
    """Complete a job whose cells have finished, once its last state needs no evaluation, comparison or checkpoint."""
    state = turn.state
    if state.plan is None or not state.ending.finished or state.checkpoints.writing or saving.is_tidying(turn):
        return  # no cell has finished, or a worker still writes a checkpoint or removes old ones
    if state.step < state.spec.training.steps:
        return  # a decision has ended training, but the root has not reported it yet
    evaluated = state.terms.early_stop is not None or state.spec.training.steps in state.progress.evaluations
    if state.spec.training.evaluation and not evaluated:
        return  # the root has not reported the last evaluation yet
    finished, stages = dict(state.ending.finished), len(state.plan.stages)
    if not any(finished.keys() >= set(layout.cells(stages)) for layout in state.plan.layouts):
        return
    if not state.is_compared(state.spec.training.steps, state.certain_holders(state.plan)):
        return  # not all holders of the last state have reported its sums
    if not begin(turn):
        _complete(turn)


def _complete(turn: Turn) -> None:
    lacking = "; there is no checkpoint of the last state" if is_missing(turn.state) else ""
    steps, stop = turn.state.spec.training.steps, turn.state.terms.early_stop
    if stop is None:
        turn.finish(Outcome.COMPLETE, "Complete", f"all {steps} steps are done{lacking}")
        return
    text = f"{stop.why}; the last one is that after {steps} of {count(stop.wanted_steps, 'step')}"
    turn.finish(Outcome.COMPLETE, EARLY_STOPPED, f"{text}{lacking}")


def begin(turn: Turn) -> bool:
    """Begin a checkpoint of the last state, written by the workers that finished its stages. Return False, and begin
    nothing, if the job keeps no last state, has saved it already, or can no longer save it.
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
    requested = c.requested(steps, writers, plan, turn.now)
    attempt = sha256(f"{state.terms.secret} {requested.number} last".encode()).hexdigest()[:12]
    turn.put(replace(requested, parts={}, writing=CheckpointId(step=steps, id=attempt), final=True))
    _ask(turn)
    return True


def is_missing(state: CoordinatorState) -> bool:
    """Return whether the job is to keep its last state and no checkpoint of it is known."""
    return (state.spec.checkpoint is not None or state.terms.last_state != "") and last_checkpoint(state) is None


def last_checkpoint(state: CoordinatorState) -> CheckpointId | None:
    """Return a known checkpoint of the last state, or None. The newest plan may begin with it."""
    steps, plan = state.spec.training.steps, state.plan
    begun = plan.restore if plan and not plan.moved else None  # the cut of a new split is in no store
    return next((one for one in (*state.checkpoints.kept, begun) if one is not None and one.step >= steps), None)


def look_after(turn: Turn) -> None:
    """Ask the writers of the last state again while parts are missing, since a message may have been lost."""
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
    """Return, by stage, up to MOST_WRITERS present workers that finished it; workers under notice only if all are."""
    finishers = []
    plan = state.current_plan
    for number in range(len(plan.stages)):
        named = dict.fromkeys(w for cell, w in sorted(state.ending.finishers.items()) if cell.stage == number)
        present = [w for w in named if w in state.workers and not state.workers[w].released]
        staying = [w for w in present if state.stays(w)]
        finishers.append(tuple((staying or present)[:MOST_WRITERS]))
    return tuple(finishers)
