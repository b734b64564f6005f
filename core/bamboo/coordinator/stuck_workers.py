"""Which worker is stuck: it lives, and has been inside one instruction for far longer than a step takes.

A dataset that hangs or a kernel that never ends stops the thread that works, and not the one that sends heartbeats.
Unless it is given up, all others wait for it until the job's progress deadline.
"""

from dataclasses import replace

from bamboo.coordinator.events import Emit
from bamboo.coordinator.planner import planning_view
from bamboo.coordinator.state import CoordinatorState, Turn
from bamboo.coordinator.workers.membership import declare_lost
from bamboo.planning.plan import Plan, WorkerId
from bamboo.planning.transitions import takeover

STUCK_SECONDS = 60.0
STUCK_STEPS = 20  # usual ones
FAMILIAR_STEPS = 3  # committed under a plan before its durations say anything: first calls may take long


def check_stuck(turn: Turn) -> None:
    """Declare the one worker lost that holds all others up, if the job can go on without it."""
    state = turn.state
    limit = _limit(state)
    if limit is None or turn.now - state.last_progress <= limit:
        return
    stuck = [w for w, r in state.workers.items() if r.busy > limit and r.cut_since is None]
    if len(stuck) != 1:
        return  # what holds several up at once is none of them, but what they share
    (worker,) = stuck
    if not _dispensable(turn, worker):
        return
    record = state.workers[worker]
    where = record.doing or "inside one instruction"
    why = f"it is running, but has been {where}; a step usually takes {state.usual_step:.3g} s"
    turn.do(Emit("WorkerStuck", f"{worker} is stuck: {why}", True))
    declare_lost(turn, worker, "it is stuck")


def _limit(state: CoordinatorState) -> float | None:
    """Seconds; None as long as nobody can say what is usual."""
    usual, plan = state.usual_step, state.plan
    if state.phase != "Running" or plan is None or usual is None:
        return None
    familiar = state.step >= state.planned_step + FAMILIAR_STEPS and state.generation == plan.target.generation
    return max(STUCK_SECONDS, STUCK_STEPS * usual) if familiar else None


def _dispensable(turn: Turn, worker: WorkerId) -> bool:
    """Has every cell of it another holder whose copy counts? Else only the worker itself can go on."""
    now = planning_view(turn.state, turn.now)
    live = {w: peer for w, peer in now.live.items() if w != worker}
    return worker in now.plan.worker_ids() and isinstance(takeover(replace(now, live=live)), Plan)
