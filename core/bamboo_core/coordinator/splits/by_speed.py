"""Layers split anew over the same workers for the sake of speed, when measured times say so.

It is done if a step is expected to become shorter by `WORTH` for long enough, if that brings the pause in, and if
workers have room for it. It is not done again for the same workers for `REST_SECONDS`, so speeds that change all the
time are not chased. See docs/design/stragglers.md.
"""

from collections.abc import Sequence
from math import inf
from statistics import median
from typing import Final

from bamboo_core.coordinator.checkpointing.checkpoints import AHEAD_STEPS
from bamboo_core.coordinator.grids import following
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.splits.record import FasterSplit
from bamboo_core.coordinator.splits.worker_speeds import owned_times
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.job.spec import stabilization_seconds
from bamboo_core.planning.plan import Cell, WorkerId
from bamboo_core.planning.splits.resplit import balanced, grid_of, keeps_its_seats
from bamboo_core.planning.splits.speeds import WorkEstimate
from bamboo_core.planning.splits.uneven_split import Ranges, step_seconds

LEAST_STEPS: Final = 10  # for which something must have lasted, beside stabilizationSeconds
WORTH: Final = 0.1  # of a step: by which it must become shorter for something to be done about speeds
REST_SECONDS: Final = 1200.0  # until the same is done again for the same workers
BYTES_PER_SECOND: Final = 1e8  # at which layers are taken to move, until one move has been seen


def look_after(turn: Turn, *, suspected: bool, slow: Sequence[str]) -> None:
    """Note since when another split is expected to be faster, and ask for it once that lasts.

    suspected: somebody may be slow, which may be over soon, or be met by a replacement. slow: who is, for a person.
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
    """Who runs which cell, in their order."""
    plan = state.current_plan
    return tuple(plan.at(cell).owner for cell in plan.cells())


def lasts(state: CoordinatorState, since: tuple[float, int], now: float, at_most: float = inf) -> bool:
    """Has it been so for `elastic.stabilizationSeconds`, or for at_most seconds if that is less, and for some steps?

    since: when, and at which step.
    """
    seconds, step = since
    wanted = min(at_most, stabilization_seconds(state.spec))
    return now - seconds >= wanted and state.step - step >= LEAST_STEPS


def is_free(state: CoordinatorState) -> bool:
    """Is nothing going on, and is the job not about to end?"""
    plan = state.current_plan
    ending = state.step + 2 * AHEAD_STEPS >= state.spec.training.steps
    leaving = any(not state.workers[w].released for w in state.noticed)
    return not (
        ending or leaving or state.ending.stopping or state.grids.resize or plan.worker_ids() - state.plans.applied
    )


def _faster(state: CoordinatorState, slow: Sequence[str], now: float) -> FasterSplit | None:
    """The best split for these workers; None if it is not worth its pause, if there is no memory for it, or if the
    layers were split for these workers lately.
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
    told = f"a step is expected to take {before - gain:.3g} s instead of {before:.3g} s: {why}"
    return FasterSplit(stages=stages, why=f"the layers are split anew: {told}")


def _can_move(state: CoordinatorState) -> bool:
    """May layers move at all, is everybody in a place of its own, and has everybody said what it takes?"""
    plan = state.current_plan
    live = state.live(plan)
    places, layers = len(plan.stages) * state.spec.worker.devices, plan.stages[-1][1]
    fixed = state.spec.topology.split is not None or len(plan.stages) == 1 or places == layers
    if fixed or not state.progress.step_seconds or not keeps_its_seats(plan, live, live, grid_of(plan)):
        return False
    return len(owned_times(state)) == len(plan.cells())


def _least(state: CoordinatorState, work: WorkEstimate) -> float:
    """Seconds of a step's computing that no split can go below: as if each layer could be cut."""
    shares = [len(part) for part in state.current_plan.target.split]
    stages = range(len(state.current_plan.stages))
    weights = (max(share * _slowness(state, work, d, s) for d, share in enumerate(shares)) for s in stages)
    return sum(work.costs) / sum(state.spec.worker.devices / weight for weight in weights)


def _has_memory(state: CoordinatorState, stages: Ranges) -> bool:
    """Can each worker that knows its limit hold what it would have with that split? As if all layers took the same,
    and, where the grid is chosen, by what is counted of each layer.
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
    """Seconds of a step's computing with that split, by the same workers."""
    plan = state.current_plan
    fixed = work.fixed(len(stages))
    seconds = [fixed[s] + sum(work.costs[first:end]) for s, (first, end) in enumerate(stages)]
    rows = [[t * _slowness(state, work, d, s) for s, t in enumerate(seconds)] for d in range(len(plan.pipelines))]
    return step_seconds(rows, [len(part) for part in plan.target.split], state.spec.worker.devices)


def _slowness(state: CoordinatorState, work: WorkEstimate, pipeline: int, stage: int) -> float:
    return work.slowness.get(state.current_plan.at(Cell(pipeline, stage)).owner, 1.0)


def pays(state: CoordinatorState, gain: float) -> bool:
    """Is the pause of a measure brought in until the next one, or the end, if steps are shorter by so many seconds?"""
    left = state.spec.training.steps - state.step
    return gain * min(left, REST_SECONDS / (state.usual_step or REST_SECONDS)) >= _pause(state)


def _pause(state: CoordinatorState) -> float:
    """Seconds for which a split stops the job: as long as the last one did, else by what memory workers take."""
    if state.splits.pause is not None:
        return state.splits.pause
    held = [record.memory.peak for record in state.workers.values() if record.memory]
    return (state.usual_step or 0.0) + max(held, default=0) / BYTES_PER_SECOND
