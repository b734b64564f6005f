"""Saving of checkpoints: their steps, the workers that write the layers, and the completion by a manifest.

The root marks the commit after which the state is saved (for the last state, see also `finish`). Each worker named as
a writer copies its layers of that state and writes them, usually while training goes on. When all layers are durable,
a worker writes the manifest. `restoring` goes back to checkpoints. See docs/checkpoints.md.
"""

from hashlib import sha256
from typing import Final

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control import evaluations, protocol
from bamboo_core.coordinator.checkpointing import copies
from bamboo_core.coordinator.checkpointing.intervals import interval
from bamboo_core.coordinator.events import AbandonReason, Emit, Outcome, Send
from bamboo_core.coordinator.records.checkpoints import MOST_KEPT, CheckpointState
from bamboo_core.coordinator.records.job import Stopping
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.planning.plan import ROOT, Plan, WorkerId
from bamboo_core.text import one_line

AHEAD_STEPS: Final = 2  # steps before a checkpoint's step at which the root is asked for it
AGAIN_SECONDS: Final = 5.0  # until a worker is asked again, since a message may have been lost
WRITE_SECONDS: Final = 1800.0  # limit for writing all parts of a checkpoint
STOP_SECONDS: Final = 120.0  # plus two steps: limit for the checkpoint with which a job ends
FIRST_PART_SECONDS: Final = 60.0  # limit for the first part of a writer that no longer holds a stage
TIDY_SECONDS: Final = 30.0  # for which a job that ends waits until a worker has removed old checkpoints
MOST_WRITERS: Final = 16  # of a stage


def first_number(secret: str, now: float) -> int:
    """Return the number from which a coordinator counts its requests for checkpoints and cuts.

    It depends on the time, so that workers do not mistake the requests of a restarted coordinator for those of the
    earlier one.
    """
    return int.from_bytes(sha256(f"{secret} {now}".encode()).digest()[:5], "big")


def next_one(state: CoordinatorState) -> int | None:
    """Return the number of committed steps at which the next checkpoint is due; None after the last step, or if the job
    keeps no checkpoints. With `retry`, it is due after the next step. Else it is due at the first of these: the last
    step; the next multiple of everySteps or, without everySteps, one `interval` after `last_step`, but not before the
    next step; with keepBest, the next step whose state is evaluated.
    """
    c, spec, steps = state.checkpoints, state.spec.checkpoint, state.spec.training.steps
    if spec is None or state.step >= steps:
        return None
    if c.retry:
        return state.step + 1
    after = max(c.last_step, state.step)
    evaluation = state.spec.training.evaluation
    periods = [spec.every_steps, evaluation.every_steps if spec.keep_best and evaluation else None]
    found = [(after // period + 1) * period for period in periods if period is not None]
    if spec.every_steps is None:
        found.append(max(c.last_step + interval(state, spec), state.step + 1))
    return min(*found, steps)


def look_after(turn: Turn) -> None:
    """Request a checkpoint that is due soon. For one in progress, ask workers again, or abandon it if it fails."""
    keeps = turn.state.spec.checkpoint is not None or turn.state.checkpoints.writers
    if not keeps or turn.state.plan is None:
        return
    if turn.state.splits.resplit or (turn.state.plan.sources and turn.state.step == turn.state.plan.first_step):
        return  # no step is committed until the layers have moved
    _keep_the_endangered(turn)
    state = turn.state
    c = state.checkpoints
    if not c.writers:
        if state.lost(state.current_plan):
            return  # first a new plan replaces the lost workers
        at = next_one(state)
        if at is not None and state.step + AHEAD_STEPS >= at:
            _request(turn, at)
        return
    lost, missing = _lost_writers(turn, state.current_plan), _missing(c, state.current_plan)
    if lost and missing and c.writing is None:
        _request(turn, c.at)
    elif lost and missing:
        why = f"{' and '.join(lost)} cannot write {'its' if len(lost) == 1 else 'their'} part"
        _abandon(turn, AbandonReason.WRITER_LOST, why, retry=True)
    elif c.writing is None and _came_too_late(turn):
        _abandon(turn, AbandonReason.TOO_LATE, "the last step was committed without it")
    elif c.writing is not None and turn.now - c.since > WRITE_SECONDS:
        _abandon(turn, AbandonReason.TOO_SLOW, f"it is not written after {WRITE_SECONDS:g} s")
    elif _lacks_pause(state):
        _request(turn, state.step + 1)  # the root was asked before the job had to end, so without a pause
    elif c.writing is None:
        if c.asked != state.current_plan.at(ROOT).owner or turn.now - c.asked_at > AGAIN_SECONDS:
            _ask_root(turn)
    elif not missing and (c.asked not in state.workers or turn.now - c.asked_at > AGAIN_SECONDS):
        _commit(turn)


def stop(turn: Turn, reason: str, message: str) -> None:
    """End the job. If it keeps checkpoints, trains and may have steps after the newest one, first try to save another.

    The root pauses at that checkpoint, so that a resumed job usually repeats no step. If the root is lost while workers
    write the checkpoint, the worker that takes over commits more steps, which a resumed job repeats. In a job that
    keeps checkpoints, a coordinator that has just restarted first waits for its workers.
    """
    state = turn.state
    unheard = state.phase == "Recovering"
    stopping = Stopping(reason=reason, message=message, step=state.step, since=turn.now, unheard=unheard)
    ending = replace(state.ending, stopping=stopping)
    if state.spec.checkpoint and unheard:
        turn.put(ending)
    elif state.spec.checkpoint and state.phase == "Running" and _has_unkept(state):
        turn.put(ending, replace(state.checkpoints, retry=True))
    else:
        turn.finish(Outcome.INTERRUPTED, reason, message)


def _has_unkept(state: CoordinatorState) -> bool:
    """Return whether steps may come after the job's newest checkpoint; one with which it began does not count."""
    newest = max((one.step for one in state.checkpoints.kept), default=0)
    return state.step > newest or not state.progress.counting


def stop_if_kept(turn: Turn) -> None:
    """End a job that was asked to stop, once it does not train or its last checkpoint is saved, abandoned or late."""
    state, c, stopping = turn.state, turn.state.checkpoints, turn.state.ending.stopping
    if stopping is None:
        return
    late = turn.now - stopping.since > STOP_SECONDS + 2 * (state.usual_step or 0.0)
    if state.phase == "Recovering" and not late:
        return
    if state.phase == "Running" and stopping.unheard:  # the workers have returned
        stop(turn, stopping.reason, stopping.message)
        return
    kept = bool(c.kept) and c.kept[0].step >= stopping.step
    given_up = state.phase != "Running" or not (c.writers or c.retry or kept)
    if given_up or late or (kept and not is_tidying(turn)):
        turn.finish(Outcome.INTERRUPTED, stopping.reason, stopping.message)


def _lacks_pause(state: CoordinatorState) -> bool:
    """Return whether to repeat the open request to the root with `pause`, as it is from before the job had to end."""
    c, stopping = state.checkpoints, state.ending.stopping
    asked_before = stopping is not None and c.writing is None and c.since < stopping.since
    return asked_before and state.step < state.spec.training.steps


def _keep_the_endangered(turn: Turn) -> None:
    """Make a checkpoint of new steps due now if all holders of a stage have notices; do so again after a new notice."""
    state, c = turn.state, turn.state.checkpoints
    noticed = frozenset(state.noticed)
    if c.writers or c.retry or not noticed - c.endangered or state.plan is None:
        return
    if any(set(holders) <= noticed for holders in state.certain_holders(state.plan)):
        turn.put(replace(c, endangered=noticed, retry=state.step > c.last_step))


def _came_too_late(turn: Turn) -> bool:
    """Return whether the root missed the request: all steps are done, and no news came for 2 * AGAIN_SECONDS."""
    state = turn.state
    over = state.step >= state.spec.training.steps
    return over and turn.now - state.progress.last_at > 2 * AGAIN_SECONDS


def _writers(state: CoordinatorState, plan: Plan) -> tuple[tuple[WorkerId, ...], ...]:
    """Return up to MOST_WRITERS certain holders of each stage: present ones without a notice or, if none is, any."""
    writers = []
    for holders in state.certain_holders(plan):
        staying = [w for w in holders if w in state.workers and state.stays(w)]
        writers.append(tuple((staying or holders)[:MOST_WRITERS]))
    return tuple(writers)


def _ask_root(turn: Turn) -> None:
    c, plan = turn.state.checkpoints, turn.state.current_plan
    root = plan.at(ROOT).owner
    turn.put(replace(c, asked=root, asked_at=turn.now))
    pause = turn.state.ending.stopping is not None
    turn.do(Send(root, protocol.TakeCheckpoint(number=c.number, at=c.at, writers=c.writers, pause=pause)))


def _request(turn: Turn, at: int) -> None:
    """Ask the root for a checkpoint of the state after `at` or more steps, and deal the layers to writers."""
    c, plan = turn.state.checkpoints, turn.state.current_plan
    turn.put(c.requested(at, _writers(turn.state, plan), plan, turn.now))
    _ask_root(turn)


def _lost_writers(turn: Turn, plan: Plan) -> list[WorkerId]:
    """Return the writers of missing layers that are gone or, unless `final`, neither hold their stage nor write on."""
    state, c, lost = turn.state, turn.state.checkpoints, set()
    for stage, writers in enumerate(c.writers):
        layers, holders = plan.stages[stage], plan.holders_of(stage)
        for worker in writers:
            held = c.final or worker in holders or _writes_on(turn, worker, layers)
            if not (held and worker in state.workers) and (c.writing is None or _unwritten(c, worker, layers)):
                lost.add(worker)
    return sorted(lost)


def is_writing(turn: Turn, worker: WorkerId) -> bool:
    """Return whether a worker under notice may still write its share of the checkpoint in progress, from its copies."""
    plan = turn.state.plan
    return plan is not None and any(_writes_on(turn, worker, layers) for layers in plan.stages)


def _writes_on(turn: Turn, worker: WorkerId, layers: tuple[int, int]) -> bool:
    """Return whether a worker under notice may still write layers of a stage to the checkpoint in progress.

    It writes copies, which are certain only once one of their files is durable: it may have copied another stage and
    not this one. Until then, the coordinator waits FIRST_PART_SECONDS. layers: first and end of the stage's range.
    """
    c = turn.state.checkpoints
    if worker not in turn.state.noticed or c.writing is None or not _unwritten(c, worker, layers):
        return False
    begun = any(c.dealt.get(layer) == worker and layer in c.parts for layer in range(*layers))
    return begun or turn.now - c.since < FIRST_PART_SECONDS


def _unwritten(c: CheckpointState, worker: WorkerId, layers: tuple[int, int]) -> list[int]:
    """Return the layers in this range that this worker is to write and that are not known to be durable."""
    return [layer for layer in range(*layers) if c.dealt.get(layer) == worker and layer not in c.parts]


def _missing(c: CheckpointState, plan: Plan) -> frozenset[int]:
    """Return the layers of the checkpoint in progress whose files are not known to be durable."""
    return frozenset(range(plan.stages[-1][1])) - c.parts.keys()


def _commit(turn: Turn) -> None:
    """Ask a worker to write the manifest, unless an evaluation or a comparison of the state is awaited.

    Prefer the root, which waits until the history has the steps up to the checkpoint. Later calls prefer others.
    """
    c, state = turn.state.checkpoints, turn.state
    assert c.writing is not None
    if _awaits_evaluation(state, c.writing.step):
        return  # the score follows within a step
    holders = [state.current_plan.holders_of(stage) & set(writers) for stage, writers in enumerate(c.writers)]
    if not state.is_compared(c.writing.step, holders):
        return  # only a state on which its holders agree is saved
    staying = [w for w in state.ready if state.stays(w) and w != c.asked] or list(state.ready)
    if not staying:
        return
    if state.plan is not None:
        root = state.plan.at(ROOT).owner
        staying.sort(key=lambda worker: worker != root)
    turn.put(replace(c, asked=staying[0], asked_at=turn.now))
    parts = tuple(c.parts[layer] for layer in sorted(c.parts))
    score, common = _score(state, c), c.common.get(c.writing, {})
    request = protocol.CommitCheckpoint(checkpoint=c.writing, parts=parts, score=score, common=common)
    turn.do(Send(staying[0], request))


def _score(state: CoordinatorState, c: CheckpointState) -> float | None:
    evaluation, spec = state.spec.training.evaluation, state.spec.checkpoint
    if evaluation is None or spec is None or not spec.keep_best or c.writing is None:
        return None
    return evaluations.score(evaluation, state.progress.evaluations.get(c.writing.step, {}))


def _awaits_evaluation(state: CoordinatorState, step: int) -> bool:
    """Return whether a step's state needs a score (`keepBest`) and is not evaluated; False once the job has to stop."""
    evaluation, spec = state.spec.training.evaluation, state.spec.checkpoint
    if evaluation is None or spec is None or not spec.keep_best or state.ending.stopping is not None:
        return False
    due = step > 0 and (step % evaluation.every_steps == 0 or step == state.spec.training.steps)
    return due and step not in state.progress.evaluations


def _abandon(turn: Turn, reason: AbandonReason, why: str, *, retry: bool = False) -> None:
    c = turn.state.checkpoints
    step = c.writing.step if c.writing else turn.state.step
    turn.do(Emit("CheckpointAbandoned", f"the checkpoint of step {step} is given up: {one_line(why)}", True))
    final_failed = step >= turn.state.spec.training.steps and c.writing is not None
    turn.put(
        replace(
            c,
            writers=(),
            writing=None,
            parts={},
            asked=None,
            retry=retry and not c.final,
            last_step=turn.state.step,
            counts=c.counts.abandoning(reason),
            final=False,
            final_failures=c.final_failures + final_failed,
        )
    )
    copies.given_up(turn, c.writing)


def leave_behind(turn: Turn) -> None:
    """Abandon the checkpoint in progress, or drop its open request, since a step begins anew on another grid."""
    c = turn.state.checkpoints
    if c.writing is not None:
        _abandon(turn, AbandonReason.WENT_BACK, "the step after it begins anew on another grid", retry=True)
    else:
        turn.put(replace(c, writers=(), asked=None))


def never_restore(turn: Turn, newest_good: int) -> None:
    """Rule out known checkpoints after more than `newest_good` steps, even one in progress: they may be wrong."""
    c = turn.state.checkpoints
    begun = (*c.kept, *((c.writing,) if c.writing else ()))
    bad = tuple(one for one in begun if one.step > newest_good and one not in c.bad)
    kept = tuple(one for one in c.kept if one not in bad)
    turn.put(replace(c.keeping(kept), bad=(*c.bad, *bad)[-MOST_KEPT:]))


# what workers report


def committed(turn: Turn, message: protocol.StepCommitted) -> None:
    """Record the checkpoint that a commit carried, if any.

    Abandon the checkpoint in progress if its step is reported without it: then a new root has committed that step
    again, and all workers that knew of the checkpoint are gone.
    """
    c = turn.state.checkpoints
    if message.checkpoint is not None:
        carried(turn, *message.checkpoint)
    elif c.writing is not None and not c.final and c.writing.step == message.step + 1:
        _abandon(turn, AbandonReason.WRITER_LOST, "all workers that knew of it are gone", retry=True)


def carried(turn: Turn, number: int, checkpoint: CheckpointId) -> None:
    """Record that a commit has carried the checkpoint request with this number, if that request is open."""
    c = turn.state.checkpoints
    if number != c.number or not c.writers or c.writing is not None:
        return
    parts = dict(c.early.get(checkpoint, {}))  # reported before the commit
    turn.put(replace(c, writing=checkpoint, since=turn.now, asked=None, parts=parts, early={}, failed={}))
    if checkpoint in c.failed:
        _abandon(turn, AbandonReason.STORE_FAILED, c.failed[checkpoint])
    else:
        commit_if_written(turn)


def parts_written(turn: Turn, worker: WorkerId, message: protocol.PartsWritten) -> None:
    c, plan = turn.state.checkpoints, turn.state.plan
    if plan is None:
        return
    new = {part.layer: part for part in message.parts if part.layer < plan.stages[-1][1]}
    if message.checkpoint == c.writing or (c.writers and c.writing is None):
        turn.put(c.with_parts(message.checkpoint, new, message.stall, message.common))
        commit_if_written(turn)


def is_written(state: CoordinatorState) -> bool:
    """Return whether all files of the checkpoint in progress are known to be durable."""
    c, plan = state.checkpoints, state.plan
    return plan is not None and c.writing is not None and not _missing(c, plan)


def commit_if_written(turn: Turn) -> None:
    """Call `_commit` if all files of the checkpoint in progress are known to be durable."""
    if is_written(turn.state):
        _commit(turn)


def checkpoint_committed(turn: Turn, worker: WorkerId, message: protocol.CheckpointCommitted) -> None:
    c = turn.state.checkpoints
    if message.tidied and c.tidying == (message.checkpoint, worker):
        turn.put(replace(c, tidying=None))
        c = turn.state.checkpoints
    if message.checkpoint != c.writing:
        _heard_again(turn, message.checkpoint)
        return
    seconds = turn.now - c.since
    saved = replace(
        c,
        kept=(message.checkpoint, *c.kept)[:MOST_KEPT],
        kept_at=turn.now,
        bytes=sum(part.bytes for part in c.parts.values()),
        seconds=seconds,
        writers=(),
        writing=None,
        parts={},
        asked=None,
        last_step=message.checkpoint.step,
        counts=c.counts.saved(seconds, c.stall),
        final=False,
        tidying=None if message.tidied else (message.checkpoint, worker),
    )
    turn.put(saved)
    text = f"the state of step {message.checkpoint.step} is saved, in {seconds:.1f} s"
    turn.do(Emit("CheckpointSaved", text))
    copies.committed(turn, message.checkpoint)


def _heard_again(turn: Turn, checkpoint: CheckpointId) -> None:
    """Record a committed checkpoint of the last state if it is unknown here and none is in progress; ignore others."""
    c = turn.state.checkpoints
    if checkpoint.step >= turn.state.spec.training.steps and checkpoint not in (*c.kept, *c.bad) and c.writing is None:
        turn.put(c.keeping((checkpoint, *c.kept)[:MOST_KEPT]))


def is_tidying(turn: Turn) -> bool:
    """Return whether to wait for a worker that removes old checkpoints, at most TIDY_SECONDS after the newest one."""
    c = turn.state.checkpoints
    if c.tidying is None or c.kept_at is None:
        return False
    return c.tidying[1] in turn.state.workers and turn.now - c.kept_at < TIDY_SECONDS


def checkpoint_failed(turn: Turn, worker: WorkerId, message: protocol.CheckpointFailed) -> None:
    c, why = turn.state.checkpoints, f"{worker}: {message.message}"
    if c.writers and message.checkpoint == c.writing:
        _abandon(turn, AbandonReason.STORE_FAILED, why)
    elif c.writers and c.writing is None:
        turn.put(replace(c, failed={**c.failed, message.checkpoint: why}))
