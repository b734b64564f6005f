"""Restoring a job from a checkpoint: the search for one, the time limit of restores, and the steps to repeat."""

from typing import Final

from bamboo_core.control import protocol
from bamboo_core.coordinator.checkpointing import copies
from bamboo_core.coordinator.checkpointing.saving import AGAIN_SECONDS
from bamboo_core.coordinator.events import AbandonReason, Emit, Outcome, RestoreCause, RestoreProblem, Send
from bamboo_core.coordinator.progress import BEGINNING
from bamboo_core.coordinator.records.checkpoints import MOST_KEPT
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.job.spec import wanted_workers
from bamboo_core.planning.plan import WorkerId
from bamboo_core.text import count, one_line

BEGIN_ANEW: Final = "with another spec.checkpoint.storage the job begins at step 0"
RESTORE_SECONDS: Final = 24 * 3600.0  # limit of restores from a loss until a commit; nodes may be scarce for a night


def lost(turn: Turn, reason: str, message: str) -> None:
    """Handle the loss of all copies of a stage's state, or of all workers.

    The job goes back (`go_back`) if it keeps checkpoints or if `nothing_trained`; else it ends as Unrecoverable.
    Do nothing while the job is already going back.
    """
    if turn.state.phase == "Restoring":
        return
    if turn.state.spec.checkpoint is None and not nothing_trained(turn.state):
        text = f"{message}; not recoverable without a checkpoint (spec.checkpoint keeps them)"
        turn.finish(Outcome.UNRECOVERABLE, reason, text)
        return
    go_back(turn, reason, message)


def go_back(turn: Turn, reason: str, message: str) -> None:
    """Begin a restore, and abandon a checkpoint in progress. The next plan starts from the checkpoint that is found.

    If the job keeps none or none is found, it starts at step 0 if `may_begin_again` allows that; else it ends.
    """
    back = "the job goes back to a checkpoint"
    then = "no step is committed yet, and the job begins anew" if nothing_trained(turn.state) else back
    turn.do(Emit("Restoring", f"{message}; {then}", True))
    c = turn.state.checkpoints
    if c.writers:
        turn.put(replace(c, counts=c.counts.abandoning(AbandonReason.WENT_BACK)))
    turn.put(turn.state.inquiry.over())
    _begin_to_look(turn, reason, message)


def _begin_to_look(turn: Turn, reason: str, message: str, *, pausing: bool = False) -> None:
    """Start the search for a checkpoint. pausing: wait first, because an attempt has just failed."""
    state, back_since = turn.state, turn.state.restoring.back_since
    turn.put(
        replace(state.checkpoints, asked=None, writers=(), writing=None, parts={}, early={}, final=False),
        replace(
            state.restoring,
            looked=False,
            found=None,
            asked=None,
            asked_at=turn.now,
            pausing=pausing,
            reason=reason,
            message=message,
            back_since=turn.now if back_since is None else back_since,
        ),
    )
    turn.enter("Restoring")


def may_begin_again(state: CoordinatorState) -> bool:
    """Return whether the job may start at step 0 if it has no checkpoint to go back to.

    True if `nothing_trained`, or if the job keeps checkpoints and none is known to be unusable. Else the job must not
    repeat all its steps unasked: the user may know a better way.
    """
    none_yet = state.spec.checkpoint is not None and not (state.checkpoints.bad or state.restoring.spoiled)
    return nothing_trained(state) or none_yet


def nothing_trained(state: CoordinatorState) -> bool:
    """Return whether the coordinator knows that the job began at step 0, and knows of no committed step."""
    begun_with = state.plan.first_step if state.plan else 0
    return state.progress.counting and not (
        state.step or state.progress.furthest or state.progress.earlier.step or begun_with
    )


def check_deadline(turn: Turn) -> None:
    """End a restoring job as Unrecoverable if it committed no step for RESTORE_SECONDS since it first went back."""
    state, c = turn.state, turn.state.restoring
    if state.phase != "Restoring" or c.back_since is None or turn.now - c.back_since <= RESTORE_SECONDS:
        return
    here = f"{len(state.ready)} of {count(wanted_workers(state.spec), 'worker')} ready"
    text = f"the job could not go on from a checkpoint within {RESTORE_SECONDS / 3600:g} h"
    turn.finish(Outcome.UNRECOVERABLE, "RestoreDeadlineExceeded", f"{text}: {c.problem or c.message}; {here}")


def restore_failed(turn: Turn, worker: WorkerId, message: protocol.RestoreFailed) -> None:
    """Look for a checkpoint again if a worker cannot read the checkpoint from which the newest plan starts.

    The search leaves out a damaged checkpoint. If it is only unreadable at present, the search waits for AGAIN_SECONDS.
    """
    state, c = turn.state, turn.state.checkpoints
    plan = state.plan
    if state.phase != "Running" or plan is None or (plan.origin, plan.restore) != (message.origin, message.checkpoint):
        return
    text = f"{worker} cannot read the checkpoint of step {message.checkpoint.step}: {one_line(message.message)}"
    if not message.damaged and message.checkpoint not in c.kept:
        text += f"; {BEGIN_ANEW}"
    turn.do(Emit("CheckpointUnusable" if message.damaged else "RestoreFailed", text, True))
    problem = RestoreProblem.DAMAGED if message.damaged else RestoreProblem.UNREADABLE
    known = replace(c, counts=c.counts.unusable(problem))
    if message.damaged:
        left = known.keeping(one for one in c.kept if one != message.checkpoint)
        known = replace(left, bad=(*c.bad, message.checkpoint)[-MOST_KEPT:])
    turn.put(known)
    _begin_to_look(turn, "RestoreFailed", text, pausing=not message.damaged)


def is_known(turn: Turn) -> bool:
    """Return whether no search for a checkpoint is left to do. If one is, ask a ready worker, but not too often."""
    state, c = turn.state, turn.state.restoring
    if state.spec.checkpoint is None or c.looked:
        return True
    wait = turn.now - c.asked_at <= AGAIN_SECONDS and (c.asked in state.workers or c.pausing)
    if not wait and state.ready:
        worker = next((w for w in state.ready if w != c.asked), None) or next(iter(state.ready))
        asking = replace(c, asked=worker, asked_at=turn.now, question=c.question + 1)
        turn.put(asking)
        turn.do(Send(worker, protocol.FindCheckpoint(number=asking.question, bad=state.checkpoints.bad)))
    return False


def checkpoint_found(turn: Turn, worker: WorkerId, message: protocol.CheckpointFound) -> None:
    c = turn.state.restoring
    if c.looked or message.number != c.question or turn.state.phase not in ("Pending", "Restoring"):
        return
    if message.problem:
        if message.problem != c.problem:
            turn.do(Emit("CheckpointStoreUnavailable", one_line(message.problem), True))
        turn.put(replace(c, problem=message.problem))
        return
    if message.other_data and message.checkpoint:
        text = f"the checkpoint of step {message.checkpoint.step} was trained with {one_line(message.other_data)}"
        turn.finish(Outcome.FAILED, "DataMismatch", f"{text}; {BEGIN_ANEW}")
        return
    for text in message.passed:
        turn.do(Emit("CheckpointUnusable", one_line(text), True))
    newest = message.checkpoint.step if message.checkpoint else -1
    known = turn.state.checkpoints
    left = known.keeping(one for one in known.kept if one.step <= newest)  # the worker passed over newer ones
    spoiled = bool(message.passed) and message.checkpoint is None
    looked = replace(c, looked=True, found=message.checkpoint, asked=None, problem="", spoiled=spoiled)
    turn.put(left, looked)


def repeats(turn: Turn, first: int) -> None:
    """Count the committed steps that the job repeats when a plan begins with the state after `first` steps."""
    state, c = turn.state, turn.state.checkpoints
    turn.put(
        replace(state.progress, furthest=max(state.progress.furthest, state.step)),
        replace(c, counts=c.counts.repeating(max(0, state.step - first), state.usual_step or 0.0)),
    )


def begun(turn: Turn) -> None:
    """Record that a new plan begins with the checkpoint found, or at step 0, and count the steps that it repeats."""
    c, state = turn.state.restoring, turn.state
    first = c.found.step if c.found else 0
    repeated = max(0, max(state.step, state.progress.earlier.step) - first)
    if (state.phase == "Restoring" and c.reason) or c.found or (repeated and state.spec.checkpoint):
        text = f"the job goes on from the checkpoint of step {first}" if c.found else "the job begins again"
        again = f", and repeats {count(repeated, 'step')}" if repeated else ""
        turn.do(Emit("Restored", f"{text}{again}", bool(repeated)))
    seconds = state.usual_step or state.progress.earlier.step_seconds or 0.0
    cause = RestoreCause(c.reason) if c.reason in list(RestoreCause) else None
    if repeated and state.spec.checkpoint and not c.reason:
        cause = RestoreCause.SUSPENDED
    furthest = max(state.progress.furthest, state.step, first)
    turn.put(replace(state.progress, counting=True, furthest=furthest, earlier=BEGINNING))
    copies.begun(turn, c.found)
    known, counts = state.checkpoints, state.checkpoints.counts.repeating(repeated, seconds)
    counts = counts if cause is None else counts.restoring(cause)
    # if the job has trained nothing, the checkpoint that it was to begin with could not be read
    goes_back = c.reason and state.progress.furthest > known.first
    beginning = known.first if goes_back else first
    known = replace(known, counts=counts, last_step=first, first=beginning, retry=False)
    turn.put(known, replace(c, reason="", message="", pausing=False))
