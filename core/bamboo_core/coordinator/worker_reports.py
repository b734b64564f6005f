"""Handlers of the workers' messages to the coordinator; `received` calls the handler for a message's type."""

import re
from collections.abc import Callable
from typing import Any

from bamboo_core.control import evaluations, protocol
from bamboo_core.coordinator import guard
from bamboo_core.coordinator.checkpointing import copies, restoring, saving
from bamboo_core.coordinator.events import Emit, Outcome, Takeover
from bamboo_core.coordinator.progress import MOST_SECONDS
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.splits import cut
from bamboo_core.coordinator.state import Turn
from bamboo_core.coordinator.workers.membership import declare_lost, notice, peer_down, peer_up
from bamboo_core.coordinator.workers.platforms import refuse_other_data
from bamboo_core.planning.grid import layer_ranges
from bamboo_core.planning.plan import ROOT, WorkerId
from bamboo_core.text import count, metrics, one_line

REASON = re.compile("[A-Z][A-Za-z0-9]{,63}")
MOST_SKIPS = 10  # steps in a row that may be skipped


def received(turn: Turn, worker: WorkerId, message: protocol.Message) -> None:
    """Handle a message from one of the job's workers. Ignore other senders, and reports on abandoned states."""
    if worker not in turn.state.workers:
        return
    if isinstance(message, protocol.Heartbeat):
        turn.put(turn.state.workers.beating(worker, message, turn.now))
        return
    workers = turn.state.workers
    turn.put(workers.having(worker, replace(workers[worker], seen=turn.now)))
    handler = _HANDLERS.get(type(message))
    if handler and not (isinstance(message, _OF_STATES) and _is_of_the_past(turn, worker)):
        handler(turn, worker, message)


def _is_of_the_past(turn: Turn, worker: WorkerId) -> bool:
    """Return whether a worker's states are abandoned: they began anew with a plan that the worker has not applied."""
    plan = turn.state.plan
    return plan is not None and plan.origin > turn.state.workers[worker].origin and plan.origin > 1


def _ready(turn: Turn, worker: WorkerId, message: protocol.WorkerReady) -> None:
    if message.samples and refuse_other_data(turn, worker, message):
        return
    state = turn.state
    if message.samples and state.admission.data is None and state.spec.training.known_steps is None:
        turn.put(state.terms.with_steps(message.steps))
    ready = replace(state.workers[worker], ready=True)
    turn.put(state.admission.admitting(worker, message), state.workers.having(worker, ready))


def _profile(turn: Turn, worker: WorkerId, message: protocol.Profile) -> None:
    """Record the costs and sizes of the model's layers, and end the job if their number does not fit the topology."""
    if worker != turn.state.layers.asked or turn.state.layers.costs is not None:
        return
    spec = turn.state.spec
    try:
        layer_ranges(message.costs, spec.topology, devices=spec.worker.devices)
    except ValueError as error:
        turn.finish(Outcome.FAILED, "InvalidTopology", str(error))
        return
    memory = message.memory or None
    turn.put(replace(turn.state.layers, costs=message.costs, sizes=message.layers, memory=memory))


def _plan_applied(turn: Turn, worker: WorkerId, message: protocol.PlanApplied) -> None:
    plan = turn.state.plan
    if plan and message.epoch >= plan.origin:
        workers = turn.state.workers
        turn.put(workers.having(worker, replace(workers[worker], origin=plan.origin)))
    plans = turn.state.plans
    if plan and message.epoch == plan.epoch and worker not in plans.applied:
        turn.put(replace(plans, applied=plans.applied | {worker}, in_force=None))


def _replica_synced(turn: Turn, worker: WorkerId, message: protocol.ReplicaSynced) -> None:
    plan = turn.state.plan
    if plan is None or not plan.has(message.cell):
        return
    if plan.at(message.cell).owner == worker and message.replica in plan.at(message.cell).replicas:
        synced = turn.state.plans.synced | {(message.cell, message.replica)}
        turn.put(replace(turn.state.plans, synced=synced))


def _report(turn: Turn, worker: WorkerId, message: protocol.Report) -> None:
    """Record which states a worker holds, as it answers a ReportRequest, limited to stages and steps that exist.

    Record an empty report for a worker whose states are abandoned, or that has no plan yet.
    """
    state = turn.state
    if state.inquiry.began_at is None or state.plan is None:
        return
    numbers, steps = range(len(state.plan.stages)), state.spec.training.steps
    held = {s: v for s, v in message.held.items() if s in numbers and 0 <= v <= steps}
    kept = protocol.Report(committed=min(message.committed, steps - 1), held=held)
    if _is_of_the_past(turn, worker):
        kept = protocol.Report(committed=-1, held={})
    turn.put(replace(state.inquiry, reports={**state.inquiry.reports, worker: kept}))


def _left_behind(turn: Turn, worker: WorkerId, message: protocol.LeftBehind) -> None:
    cell = message.cell
    if turn.state.plan is None or not turn.state.plan.has(cell):
        return
    text = f"stage {cell.stage} of pipeline {cell.pipeline}: the copy that is left on {worker} is too old"
    restoring.lost(turn, "StageLost", text)


def _checkpoint_begun(turn: Turn, worker: WorkerId, message: protocol.CheckpointBegun) -> None:
    """Record the root's report that a commit has carried the request for a checkpoint or a cut."""
    saving.carried(turn, message.number, message.checkpoint)
    cut.carried(turn, message.number, message.checkpoint)


def _step_committed(turn: Turn, worker: WorkerId, message: protocol.StepCommitted) -> None:
    """Record a committed step. It may be reported twice, since a new root repeats reports that may have been lost. End
    the job if the loss or the gradient is not finite and the step is not skipped, or after too many skips in a row.
    """
    state, step = turn.state, message.step
    training = state.spec.training
    if state.plan is None or step >= training.steps or message.microbatches > training.microbatches:
        return
    saving.committed(turn, message)
    if message.checkpoint:
        cut.carried(turn, *message.checkpoint)
    if state.progress.has_heard_of(step):
        return
    if not message.skipped and (message.loss is None or message.gradient_norm is None):
        _not_finite(turn, message)
        return
    if message.loss is not None:
        turn.put(turn.state.progress.with_loss(step, message.loss))
    if message.skipped:
        _skipped(turn, message)
    turn.put(turn.state.progress.counting_step(step, training.microbatches - message.microbatches))
    if step >= state.step:
        state = turn.state
        turn.put(
            state.progress.committed(message, turn.now),
            replace(state.worker_ends, failures=(), since_commit={}),
            replace(state.restoring, back_since=None),
        )


def _evaluated(turn: Turn, worker: WorkerId, message: protocol.Evaluated) -> None:
    last, spec = max(message.states), turn.state.spec.training.evaluation
    if last > turn.state.spec.training.steps:
        return
    if message.early_stop is not None and turn.state.plan is not None:
        _stop_early(turn, last, message.early_stop)
    new = {n: values for n, values in message.states.items() if values and n not in turn.state.progress.evaluations}
    if spec is None or not new:
        return
    for step, values in sorted(new.items()):
        turn.put(turn.state.progress.evaluated(step, values, turn.now))
        is_best = evaluations.best(spec, turn.state.progress.evaluations) == step
        turn.do(Emit("Evaluated", f"after step {step}: {metrics(values)}{' (the best so far)' * is_best}"))
    saving.commit_if_written(turn)  # it may have waited for this evaluation


def _stop_early(turn: Turn, last: int, stop: evaluations.EarlyStop) -> None:
    """Shorten the job to `last` steps, because of its evaluations or a decision of the task."""
    training = turn.state.spec.training
    why = stop.why(training.evaluation.metric if training.evaluation else "state")
    turn.put(turn.state.terms.stopped_early(last, why))


def _not_finite(turn: Turn, message: protocol.StepCommitted) -> None:
    which = f"of step {message.step + 1} is not a finite number"
    if message.loss is None:
        turn.finish(Outcome.FAILED, "LossNotFinite", f"the loss {which}")
    else:
        turn.finish(Outcome.FAILED, "GradientNotFinite", f"the gradient {which}")


def _skipped(turn: Turn, message: protocol.StepCommitted) -> None:
    """Record a step that left the model unchanged; end the job after too many in a row."""
    state, step = turn.state, message.step
    skipping = state.progress.skipping(step)
    turn.put(skipping)
    in_a_row = skipping.skips_before(step)
    scale = message.metrics.get(protocol.LOSS_SCALE)
    overflow = message.loss is not None and scale is not None
    shown = f"{scale:.0f}" if scale and scale >= 1 else f"{scale}"
    why = f"the {'loss' if message.loss is None else 'gradient'} of step {step + 1} is not a finite number"
    why += f" with losses scaled by {shown}" if overflow else ""
    turn.do(Emit("StepSkipped", f"{why}, so it leaves the model as it was ({in_a_row} in a row)", warning=not overflow))
    if in_a_row > MOST_SKIPS:
        text = f"{why}; more than {count(MOST_SKIPS, 'step')} in a row had to be skipped"
        turn.finish(Outcome.FAILED, "TooManySkippedSteps", text)


def _taken_over(turn: Turn, worker: WorkerId, message: protocol.TakenOver) -> None:
    known, moves = turn.state.moves.takeovers, turn.state.moves.taken_over(worker, message)
    turn.put(moves)
    if moves.takeovers == known:
        return
    taken = moves.takeovers[-1]
    turn.do(
        Emit(
            "TakenOver",
            f"{worker} runs stage {taken.stage} of pipeline {taken.pipeline} in place of {taken.victim}:"
            f" pause {taken.pause_ms:.0f} ms, repeated {_repeated(taken)}",
        )
    )


def _repeated(taken: Takeover) -> str:
    """Describe the number of forwards and backwards that a takeover repeated."""
    counts = ((taken.forwards, "forward"), (taken.backwards, "backward"))
    return ", ".join(count(number, thing) for number, thing in counts if number) or "nothing"


def _cell_finished(turn: Turn, worker: WorkerId, message: protocol.CellFinished) -> None:
    plan, ending, cell = turn.state.plan, turn.state.ending, message.cell
    if plan is None or not plan.has(cell):
        return
    finished = {**dict(ending.finished), cell: message.digest}
    finishers = {**ending.finishers, cell: worker}
    turn.put(replace(ending, finished=tuple(sorted(finished.items())), finishers=finishers))


def _notice_received(turn: Turn, worker: WorkerId, message: protocol.NoticeReceived) -> None:
    notice(turn, worker, min(max(0.0, message.seconds), MOST_SECONDS), own=True)


def _worker_failed(turn: Turn, worker: WorkerId, message: protocol.WorkerFailed) -> None:
    reason = message.reason if REASON.fullmatch(message.reason) else "WorkerError"
    turn.finish(Outcome.FAILED, reason, f"{worker}: {one_line(message.message)}")


def _warning(turn: Turn, worker: WorkerId, message: protocol.WorkerWarning) -> None:
    text = f"{worker}: {one_line(message.message)}"
    if message.reason in WARNINGS:
        turn.do(Emit(message.reason, text, warning=True))
    elif message.reason == protocol.INITIAL_WEIGHTS and turn.state.plan and turn.state.plan.at(ROOT).owner == worker:
        turn.do(Emit("InitialWeights", one_line(message.message)))  # every worker reports the same


def events_after_end(worker: WorkerId, message: object) -> tuple[Emit, ...]:
    """Return the events for a message after the job's end: one for a WorkerWarning with a reason in AFTER_THE_END."""
    if not isinstance(message, protocol.WorkerWarning) or message.reason not in AFTER_THE_END:
        return ()
    warning = message.reason != protocol.LOGGERS_AWAITED
    return (Emit(message.reason, f"{worker}: {one_line(message.message)}", warning=warning),)


def _bye(turn: Turn, worker: WorkerId, message: protocol.Bye) -> None:
    if worker in turn.state.noticed:
        declare_lost(turn, worker, "it has left")


WARNINGS = (
    "HistoryNotWritten",
    "CheckpointStoreNotWritable",
    "LoggerFailed",
    "CallbackFailed",
    "CallbacksNotCalled",
    "CopiesNotKept",
)
AFTER_THE_END = (
    protocol.LOGGERS_AWAITED,
    "LoggerIncomplete",
    "LoggerFailed",
    "CallbackFailed",
)
_OF_STATES = (
    protocol.ReplicaSynced,
    protocol.LeftBehind,
    protocol.StepCommitted,
    protocol.Evaluated,
    protocol.TakenOver,
    protocol.CellFinished,
    protocol.StateSums,
    protocol.SpotCheckDiffers,
)
_HANDLERS: dict[type, Callable[[Turn, WorkerId, Any], None]] = {
    protocol.WorkerReady: _ready,
    protocol.Profile: _profile,
    protocol.PeerDown: peer_down,
    protocol.PeerUp: peer_up,
    protocol.PlanApplied: _plan_applied,
    protocol.ReplicaSynced: _replica_synced,
    protocol.Report: _report,
    protocol.LeftBehind: _left_behind,
    protocol.StepCommitted: _step_committed,
    protocol.Evaluated: _evaluated,
    protocol.CheckpointFound: restoring.checkpoint_found,
    protocol.CheckpointBegun: _checkpoint_begun,
    protocol.PartsWritten: saving.parts_written,
    protocol.CheckpointCommitted: saving.checkpoint_committed,
    protocol.CheckpointFailed: saving.checkpoint_failed,
    protocol.RestoreFailed: restoring.restore_failed,
    protocol.StateHeld: cut.state_held,
    protocol.CopiesHeld: copies.copies_held,
    protocol.TakenOver: _taken_over,
    protocol.CellFinished: _cell_finished,
    protocol.NoticeReceived: _notice_received,
    protocol.StateSums: guard.state_sums,
    protocol.SpotCheckDiffers: guard.spot_check,
    protocol.WorkerWarning: _warning,
    protocol.WorkerFailed: _worker_failed,
    protocol.Bye: _bye,
}
