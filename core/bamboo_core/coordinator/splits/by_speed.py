"""Balancing: a new split of the layers over the same workers, when measured times promise shorter steps.

The coordinator splits anew if steps are expected to become shorter by `WORTH` for long enough, if that earns back the
pause, and if the split fits in memory. It waits REST_SECONDS before the next split for the same workers, so that it
does not chase speeds that change all the time. See docs/design/stragglers.md.
"""

from collections.abc import Sequence
from math import inf
from statistics import median
from typing import Final

from bamboo_core.coordinator.checkpointing.saving import AHEAD_STEPS
from bamboo_core.coordinator.grids import following
from bamboo_core.coordinator.records.grids import FasterSplit
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.splits.worker_speeds import owned_times
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.job.spec import stabilization_seconds
from bamboo_core.planning.plan import Cell, WorkerId
from bamboo_core.planning.splits.resplit_plans import balanced, grid_of, keeps_its_seats
from bamboo_core.planning.splits.speeds import Ranges, WorkEstimate, step_seconds

LEAST_STEPS: Final = 10  # for which a difference must have lasted, in addition to stabilizationSeconds
WORTH: Final = 0.1  # share by which a step must become shorter for a new split or a replacement
REST_SECONDS: Final = 1200.0  # between two splits for the same workers
BYTES_PER_SECOND: Final = 1e8  # assumed speed of moving layers, until one move was timed


def look_after(turn: Turn, *, suspected: bool, slow: Sequence[str]) -> None:
    """Look for a faster split and record since when one is expected; once that has lasted, offer the split for a cut.

    suspected: a worker seems slow, but not for long enough to be sure; no split is offered meanwhile, nor while
    `is_free` is false. slow: descriptions of the slow workers.
    """
    state, known = turn.state, turn.state.splits
    split = _faster(state, slow, turn.now)
    if split is None:
        turn.put(replace(known, uneven=None, faster=None))
        return
    since = known.uneven or (turn.now, state.step)
    ripe = lasts(state, since, turn.now) and not suspected and is_free(state)
    turn.put(replace(known, uneven=since, faster=split if ripe else None))


def places(state: CoordinatorState) -> tuple[WorkerId, ...]:
    """Return the owner of each cell, in the order of the cells."""
    plan = state.current_plan
    return tuple(plan.at(cell).owner for cell in plan.cells())


def lasts(state: CoordinatorState, since: tuple[float, int], now: float, at_most: float = inf) -> bool:
    """Return whether a condition has lasted for LEAST_STEPS steps and for `elastic.stabilizationSeconds`.

    since: when it began, in seconds and in committed steps. at_most: upper limit of the seconds that are needed.
    """
    seconds, step = since
    wanted = min(at_most, stabilization_seconds(state.spec))
    return now - seconds >= wanted and state.step - step >= LEAST_STEPS


def is_free(state: CoordinatorState) -> bool:
    """Return whether no worker leaves, no grid change is pending, all have applied the plan, and no end is near."""
    plan = state.current_plan
    ending = state.step + 2 * AHEAD_STEPS >= state.spec.training.steps
    leaving = any(not state.workers[w].released for w in state.noticed)
    return not (
        ending or leaving or state.ending.stopping or state.grids.resize or plan.worker_ids() - state.plans.applied
    )


def _faster(state: CoordinatorState, slow: Sequence[str], now: float) -> FasterSplit | None:
    """Return a split with shorter steps on the present workers, and why it is faster.

    None if layers may not move (`_can_move`), if their times are unknown, if they were split for the speeds of these
    workers recently, or if the split is not faster by WORTH, does not earn back its pause, or does not fit in memory.
    """
    plan, work, evened = state.current_plan, state.stragglers.estimate, state.splits.evened
    rests = evened is not None and evened[0] == places(state) and now - evened[1] < REST_SECONDS
    if work is None or rests or not _can_move(state):
        return None
    before = median(state.progress.step_seconds[-LEAST_STEPS:])
    computing = _computing(state, work, plan.stages)
    if computing - _least(state, work) < WORTH * before:
        return None
    stages = balanced(plan, state.spec, work)
    gain = computing - _computing(state, work, stages)
    if gain < WORTH * before or not pays(state, gain) or not _has_memory(state, stages):
        return None
    why = "; ".join(slow) or "layers take other times than their counted costs say"
    expected = f"a step is expected to take {before - gain:.3g} s instead of {before:.3g} s: {why}"
    return FasterSplit(stages=stages, why=f"the layers are split anew: {expected}")


def _can_move(state: CoordinatorState) -> bool:
    """Return whether another split is possible, holders are live, each owner runs one cell, and owners are timed."""
    plan = state.current_plan
    live = state.live(plan)
    places, layers = len(plan.stages) * state.spec.worker.devices, plan.stages[-1][1]
    fixed = state.spec.topology.split is not None or len(plan.stages) == 1 or places == layers
    if fixed or not state.progress.step_seconds or not keeps_its_seats(plan, live, live, grid_of(plan)):
        return False
    return len(owned_times(state)) == len(plan.cells())


def _least(state: CoordinatorState, work: WorkEstimate) -> float:
    """Return a lower bound of the seconds of computation per step over all splits, as if layers could be divided."""
    shares = [len(part) for part in state.current_plan.target.split]
    stages = range(len(state.current_plan.stages))
    weights = (max(share * _slowness(state, work, d, s) for d, share in enumerate(shares)) for s in stages)
    return sum(work.costs) / sum(state.spec.worker.devices / weight for weight in weights)


def _has_memory(state: CoordinatorState, stages: Ranges) -> bool:
    """Return whether each worker has memory for a split, as far as is known: by its headroom (available over used
    memory), as if all layers had the same size, and by the layers' sizes if the coordinator chooses the grid.
    """
    plan = state.current_plan
    if not following.has_room(state, grid_of(plan), stages):
        return False
    for worker, record in state.workers.items():
        held = {c.stage for c in plan.cells() if worker in plan.at(c).holders}
        now, then = (sum(end - first for s, (first, end) in enumerate(x) if s in held) for x in (plan.stages, stages))
        if record.headroom is not None and then > now * max(1.0, record.headroom):
            return False
    return True


def _computing(state: CoordinatorState, work: WorkEstimate, stages: Ranges) -> float:
    """Return the seconds of computation per step with a split, on the same workers."""
    plan = state.current_plan
    fixed = work.fixed(len(stages))
    seconds = [fixed[s] + sum(work.costs[first:end]) for s, (first, end) in enumerate(stages)]
    rows = [[t * _slowness(state, work, d, s) for s, t in enumerate(seconds)] for d in range(len(plan.pipelines))]
    return step_seconds(rows, [len(part) for part in plan.target.split], state.spec.worker.devices)


def _slowness(state: CoordinatorState, work: WorkEstimate, pipeline: int, stage: int) -> float:
    return work.slowness.get(state.current_plan.at(Cell(pipeline, stage)).owner, 1.0)


def pays(state: CoordinatorState, gain: float) -> bool:
    """Return whether steps shorter by `gain` seconds earn back a split's pause, in REST_SECONDS or by the job's end."""
    left = state.spec.training.steps - state.step
    return gain * min(left, REST_SECONDS / (state.usual_step or REST_SECONDS)) >= _pause(state)


def _pause(state: CoordinatorState) -> float:
    """Return the seconds for which a new split stops the job: as last measured, else by step time and used memory."""
    if state.splits.pause is not None:
        return state.splits.pause
    held = [record.memory.peak for record in state.workers.values() if record.memory]
    return (state.usual_step or 0.0) + max(held, default=0) / BYTES_PER_SECOND
