"""Detection of a stuck worker: a live worker inside one instruction for far longer than a step takes.

A data set that hangs or a kernel that never ends stops the training thread but not the heartbeats. Unless the
coordinator gives the worker up, all other workers wait for it until the job's progress deadline.
"""

from bamboo_core.coordinator.events import Emit
from bamboo_core.coordinator.planner import planning_view
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.coordinator.workers.membership import declare_lost
from bamboo_core.planning.plan import Plan, WorkerId
from bamboo_core.planning.transitions import takeover
from bamboo_core.text import count

STARTING_AT = "starting, at "  # prefix of `doing` while a worker loads the task; its place in the code follows
STUCK_SECONDS = 60.0
STUCK_STEPS = 20  # or this many usual steps, if longer
HINT_SECONDS = 10.0  # beyond that limit, until an event tells the user where workers wait
MOST_HINTS = 3  # workers in a sentence
FAMILIAR_STEPS = 3  # committed under a plan before its durations count: first calls may take long


def check_stuck(turn: Turn) -> None:
    """Declare a worker lost if it alone is stuck, no step was committed meanwhile, and the worker is `_dispensable`."""
    state = turn.state
    limit = _limit(state)
    if limit is None or turn.now - state.progress.last_at <= limit:
        return
    stuck = [w for w, r in state.workers.items() if r.busy > limit and r.cut_since is None]
    if len(stuck) != 1:
        return  # the cause is something that they share
    (worker,) = stuck
    if not _dispensable(turn, worker):
        return
    record = state.workers[worker]
    where = record.doing or "inside one instruction"
    why = f"it is running, but has been {where}; a step usually takes {state.usual_step:.3g} s"
    turn.do(Emit("WorkerStuck", f"{worker} is stuck: {why}", True))
    declare_lost(turn, worker, "it is stuck")


def hint(turn: Turn) -> None:
    """Emit a NoProgress event with what busy workers are doing, once each time that no step is committed for long.

    It warns the user of a task that hangs in all workers, usually long before the progress deadline. The coordinator
    does nothing else, since a first call or a large step may take that long.
    """
    state = turn.state
    since = max(state.progress.last_at, state.course.since)
    limit = max(STUCK_SECONDS, STUCK_STEPS * (state.usual_step or 0.0)) + HINT_SECONDS
    if state.phase not in ("Pending", "Running") or state.progress.hinted == since or turn.now - since <= limit:
        return
    long = {w: r for w, r in state.workers.items() if r.busy > STUCK_SECONDS or r.doing.startswith(STARTING_AT)}
    if not long:
        return
    turn.put(replace(state.progress, hinted=since))
    doing = "; ".join(f"{w} is {r.doing}" for w, r in list(long.items())[:MOST_HINTS])
    more = f"; and {count(len(long) - MOST_HINTS, 'other')}" if len(long) > MOST_HINTS else ""
    what = "no step was committed" if state.phase == "Running" else "training did not begin"
    deadline = state.spec.progress_deadline_seconds
    until = f"; the job waits until its progress deadline of {deadline} s" if state.phase == "Running" else ""
    turn.do(Emit("NoProgress", f"{what} for {turn.now - since:.0f} s: {doing}{more}{until}", True))


def _limit(state: CoordinatorState) -> float | None:
    """Return the seconds in one instruction after which a worker is stuck; None until some steps ran under the plan."""
    usual, plan = state.usual_step, state.plan
    if state.phase != "Running" or plan is None or usual is None:
        return None
    familiar = (
        state.step >= state.plans.since_step + FAMILIAR_STEPS and state.progress.generation == plan.target.generation
    )
    return max(STUCK_SECONDS, STUCK_STEPS * usual) if familiar else None


def _dispensable(turn: Turn, worker: WorkerId) -> bool:
    """Return whether a worker is in the plan, and each cell that it owns has another usable holder."""
    now = planning_view(turn.state, turn.now)
    live = {w: peer for w, peer in now.live.items() if w != worker}
    return worker in now.plan.worker_ids() and isinstance(takeover(replace(now, live=live)), Plan)
