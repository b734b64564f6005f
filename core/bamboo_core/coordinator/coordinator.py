"""The coordinator: a pure step function from (state, event, now) to (state, commands).

Only the coordinator declares workers lost and makes plans; workers train and commit steps without it.
"""

from typing import Any

from bamboo_core.control import protocol
from bamboo_core.control.protocol import ChannelClosed, Received, StateSums, WorkerJoined
from bamboo_core.coordinator import finish, stragglers
from bamboo_core.coordinator.checkpointing import restoring, saving
from bamboo_core.coordinator.events import (
    Command,
    Event,
    Interrupted,
    NoticeWithdrawn,
    Outcome,
    PreemptionNotice,
    PricesReported,
    RemoveWorker,
    RequestsWithdrawn,
    Send,
    SpecChanged,
    Tick,
    WorkerLost,
    WorkersAbsent,
)
from bamboo_core.coordinator.finish import finish_if_done
from bamboo_core.coordinator.grids import holding
from bamboo_core.coordinator.planner import replan
from bamboo_core.coordinator.progress import BEGINNING, EarlierProgress, Progress
from bamboo_core.coordinator.records.checkpoints import CheckpointState
from bamboo_core.coordinator.records.job import JobCourse, JobTerms
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.splits import cut
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.coordinator.stuck_workers import check_stuck, hint
from bamboo_core.coordinator.worker_reports import events_after_end, received
from bamboo_core.coordinator.workers import membership
from bamboo_core.coordinator.workers.platforms import refuse_misfits
from bamboo_core.job.spec import JobSpec
from bamboo_core.names import HEARTBEAT_TIMEOUT_SECONDS
from bamboo_core.planning.plan import WorkerId


def initial(
    spec: JobSpec,
    manifest: dict[str, Any],
    *,
    secret: str,
    now: float,
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT_SECONDS,
    resumed: bool = False,
    earlier: EarlierProgress = BEGINNING,
    history: str = "",
    last_state: str = "",
) -> CoordinatorState:
    """Return a new coordinator's state, before its first event.

    now, heartbeat_timeout: seconds. resumed: workers of an earlier coordinator may reconnect. earlier: the job's
    progress under earlier coordinators. secret, history, last_state: see `JobTerms`.
    """
    return CoordinatorState(
        terms=JobTerms(
            spec=spec,
            manifest=manifest,
            secret=secret,
            history=history,
            last_state=last_state,
            started=now,
            heartbeat_timeout=heartbeat_timeout,
        ),
        course=JobCourse(phase="Recovering" if resumed else "Pending", since=now),
        progress=Progress(furthest=earlier.step, earlier=earlier, last_at=now),
        checkpoints=CheckpointState(number=saving.first_number(secret, now)),
    )


def with_workers(
    state: CoordinatorState, *, requested: int, gone: frozenset[WorkerId], counted: frozenset[WorkerId]
) -> CoordinatorState:
    """Return a new coordinator's state with the workers that its shell, the operator, has started before.

    requested: number of workers that may still join. gone: workers that are lost already. counted: workers that may
    still join but whose preemption is not counted, because an earlier coordinator counted it or asked them to leave.
    """
    turn = Turn(state, state.terms.started)
    turn.put(replace(state.membership, requested=requested, gone=gone, counted=counted))
    return turn.state


def step(state: CoordinatorState, event: Event, now: float) -> tuple[CoordinatorState, tuple[Command, ...]]:
    """Process one event; return the new state and the commands for the shell. Pure. now: seconds of a steady clock."""
    if state.phase == "Over":
        if isinstance(event, WorkerJoined):
            stop = protocol.Stop(reason="JobOver", message="the job is over")
            return state, (Send(event.hello.worker, stop), RemoveWorker(event.hello.worker))
        return state, events_after_end(event.worker, event.message) if isinstance(event, Received) else ()
    turn = Turn(state, now)
    _take_in(turn, event)
    if _changes_nothing(state, event, turn):
        return turn.state, tuple(turn.commands)
    if turn.state.phase != "Over":
        if _brings_workers(event):
            refuse_misfits(turn)
        stragglers.keep_those_without_replacement(turn)
        if isinstance(event, Received) and isinstance(event.message, protocol.StepCommitted):
            stragglers.look(turn)
        membership.request_workers(turn)
        replan(turn)
    if turn.state.phase == "Running":
        cut.look_after(turn)
        saving.look_after(turn)
        finish.look_after(turn)
        saving.stop_if_kept(turn)
    if turn.state.phase == "Running":
        finish_if_done(turn)
    return turn.state, tuple(turn.commands)


def _take_in(turn: Turn, event: Event) -> None:
    match event:
        case WorkerJoined(hello):
            membership.joined(turn, hello)
        case Received(worker, message):
            received(turn, worker, message)
        case ChannelClosed(worker):
            membership.channel_closed(turn, worker)
        case WorkerLost(worker, detail, exit_code, removed):
            membership.declare_lost(turn, worker, detail, exit_code, known=True, removed=removed)
        case WorkersAbsent(workers, detail):
            membership.absent(turn, workers, detail)
        case PreemptionNotice(worker, seconds, wanted, cause):
            membership.notice(turn, worker, seconds, wanted=wanted, cause=cause)
        case NoticeWithdrawn(worker):
            membership.notice_withdrawn(turn, worker)
        case RequestsWithdrawn(count):
            turn.put(turn.state.membership.withdrawing(count))
        case PricesReported(prices, more):
            holding.priced(turn, prices, more)
        case SpecChanged(spec):
            _edit(turn, spec)
        case Interrupted(reason, message):
            saving.stop(turn, reason, message)
        case Tick():
            _tick(turn)


def _changes_nothing(before: CoordinatorState, event: Event, turn: Turn) -> bool:
    """Return whether an event, such as a heartbeat, needs no decisions. Most events need none."""
    if isinstance(event, Received):
        return isinstance(event.message, protocol.Heartbeat) or _is_one_of_many(before, event.message, turn.state)
    return isinstance(event, Tick | NoticeWithdrawn) and before.plans.steady and turn.state is before


def _is_one_of_many(before: CoordinatorState, message: protocol.Message, after: CoordinatorState) -> bool:
    """Return whether a worker's report on a plan, replica or checkpoint can be recorded without making decisions.

    A thousand workers may send such reports after a plan or checkpoint, and most reports need no decisions.
    Return False while the job is not Running, a lost state is looked for, or layers move (`plan.sources`).
    """
    plan = after.plan
    if after.phase != "Running" or plan is None or plan.sources or after.inquiry.began_at is not None:
        return False
    match message:
        case protocol.PlanApplied():
            return not plan.worker_ids() <= after.plans.applied
        case protocol.ReplicaSynced():
            return after.plans.synced is before.plans.synced
        case protocol.CopiesHeld():
            return True
        case protocol.PartsWritten():
            return not saving.is_written(after)
        case StateSums():  # the last ones may complete a checkpoint or the job
            return not (saving.is_written(after) or after.ending.finished)
        case _:
            return False


def _brings_workers(event: Event) -> bool:
    """Return whether a worker joined or is ready, or the spec changed, so that some workers may not fit the others."""
    ready = isinstance(event, Received) and isinstance(event.message, protocol.WorkerReady)
    return ready or isinstance(event, WorkerJoined | SpecChanged)


def _edit(turn: Turn, wanted: JobSpec) -> None:
    """Adopt an edited spec, but keep the number of steps after an early stop, or if it was counted from the dataset and
    the edit leaves epochs and tokens unchanged.
    """
    training = turn.state.spec.training
    same_length = (wanted.training.epochs, wanted.training.tokens) == (training.epochs, training.tokens)
    if (training.counts_data and same_length) or turn.state.terms.early_stop:
        wanted = replace(wanted, training=replace(wanted.training, steps=training.steps))  # workers count it
    turn.put(replace(turn.state.terms, spec=wanted))
    holding.edited(turn)


def _waits_for_the_store(state: CoordinatorState) -> bool:
    """Return whether the job waits for its last checkpoint or was asked to stop, which have their own time limits."""
    over = state.step >= state.spec.training.steps and state.checkpoints.writing is not None
    return over or state.ending.stopping is not None


def _tick(turn: Turn) -> None:
    waited = _waits_for_the_store(turn.state)
    membership.check_deadlines(turn)
    check_stuck(turn)
    if turn.state.phase == "Running" and turn.state.checkpoints.writers:
        saving.look_after(turn)
        finish.look_after(turn)
    if turn.state.phase == "Running" and turn.state.splits.resplit:
        cut.look_after(turn)
    saving.stop_if_kept(turn)
    state, now = turn.state, turn.now
    limit = state.spec.progress_deadline_seconds
    restoring.check_deadline(turn)
    since = max(state.progress.last_at, *(record.worked_at for record in state.workers.values()), 0.0)
    if state.phase == "Running" and now - since > limit and not waited:
        doing = "; ".join(f"{w} is {r.doing}" for w, r in state.workers.items() if r.doing)
        turn.finish(Outcome.FAILED, "ProgressDeadlineExceeded", f"nothing was trained for {limit} s: {doing}")
    if not waited:
        hint(turn)
