"""Reconnection of workers after a restart of the coordinator, which waits for them while they train on."""

from bamboo_core.control import protocol
from bamboo_core.coordinator.checkpointing import restoring
from bamboo_core.coordinator.events import Emit, RemoveWorker, Send
from bamboo_core.coordinator.grids import holding
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.state import Turn
from bamboo_core.names import ALONE_SECONDS, ISOLATED_SECONDS, RECOVERY_SECONDS
from bamboo_core.planning.plan import Plan, WorkerId
from bamboo_core.text import count


def recovered(turn: Turn) -> bool:
    """Resume the job once all workers of the newest plan are back or overdue; return whether it resumed.

    Absent workers then count as lost, and returned workers that are not in the plan are refused. If no worker comes
    back at all, the job goes back to a checkpoint or ends.
    """
    state, plan = turn.state, turn.state.plan
    if plan is None:
        _await_the_first(turn)
        return False
    missing = plan.worker_ids() - state.ready.keys()
    if missing - state.membership.gone and turn.now - state.course.since < _patience(
        turn, plan, missing - state.membership.gone
    ):
        return False
    absent = plan.worker_ids() - state.workers.keys() - state.membership.gone
    outsiders = {w for w, r in state.workers.items() if r.epoch and w not in plan.worker_ids()}
    for worker in outsiders:
        turn.refuse(worker, "NotInPlan", f"{worker} is no longer a worker of this job")
    members = state.membership
    for worker in outsiders:
        members = members.without(worker)
    members = members.absent(absent).withdrawing(len(absent))
    turn.put(members, state.workers.without(outsiders), replace(state.progress, last_at=turn.now))
    turn.enter("Running")
    holding.resume(turn)
    turn.do(*(RemoveWorker(w) for w in sorted(absent)))
    turn.do(Emit("Recovered", f"the job continues with {count(len(turn.state.workers), 'worker')}, epoch {plan.epoch}"))
    if not missing:  # else a plan without the missing workers follows at once
        newest = protocol.SendPlan(plan=plan)
        turn.do(*(Send(w, newest) for w in turn.state.ready))
    return True


def _await_the_first(turn: Turn) -> None:
    """Give up if no worker reconnects within the progress deadline, or within RECOVERY_SECONDS if none is running."""
    state = turn.state
    patience = state.spec.progress_deadline_seconds if state.membership.requested else RECOVERY_SECONDS
    waited = turn.now - state.course.since
    if waited >= patience:
        _nobody_came_back(turn, f"no worker of the job came back within {patience:g} s")
    elif waited >= ALONE_SECONDS and not state.membership.silence_told:
        turn.put(replace(state.membership, silence_told=True))
        running = count(state.membership.requested, "worker")
        text = f"{running} running, none has reconnected to the operator in {ALONE_SECONDS:g} s"
        turn.do(Emit("WorkersSilent", text, True))


def _nobody_came_back(turn: Turn, message: str) -> None:
    """Give up all workers, whose states are lost, and go back to a checkpoint, or end the job (WorkersGone)."""
    turn.put(turn.state.membership.withdrawing(turn.state.membership.requested))
    restoring.lost(turn, "WorkersGone", message)


def _patience(turn: Turn, plan: Plan, missing: frozenset[WorkerId]) -> float:
    """Return the seconds to wait for missing workers: more if commits prove owners alive, or if most are missing."""
    state, owners = turn.state, {plan.at(cell).owner for cell in plan.cells()}
    if state.step > 0 and turn.now - state.progress.last_at < RECOVERY_SECONDS and missing & owners:
        return ALONE_SECONDS
    return RECOVERY_SECONDS + (ISOLATED_SECONDS if 2 * len(missing) > len(plan.worker_ids()) else 0.0)
