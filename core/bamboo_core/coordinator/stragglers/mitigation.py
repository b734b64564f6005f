"""Mitigation of slow workers.

A standby takes the place of a slow worker, as if that had a notice. Without one, the layers are split anew (`by_speed`)
if that pays, also if layers take longer than counted. Where no split helps, the coordinator requests one more worker as
a replacement. A job whose workers are all slow in turn is not rearranged forever: each measure happens once per
`REST_SECONDS`, a split for the same workers, and at most as many workers are replaced as the job has. See
docs/design/stragglers.md.
"""

from collections.abc import Mapping
from typing import Final

from bamboo_core.coordinator.events import Emit
from bamboo_core.coordinator.planner import planning_view
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.splits.by_speed import REST_SECONDS, WORTH, is_free, look_after, pays
from bamboo_core.coordinator.splits.worker_speeds import owned_times, seconds_of
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.coordinator.stragglers.judging import describe, judge
from bamboo_core.coordinator.stragglers.record import Straggler
from bamboo_core.coordinator.workers.membership import keep_worker, replace_worker
from bamboo_core.job.spec import wanted_workers
from bamboo_core.planning.plan import Cell, WorkerId
from bamboo_core.planning.splits.uneven_split import step_seconds

ASKING_SECONDS: Final = 600.0  # limit until a requested replacement has joined


def look(turn: Turn) -> None:
    """Judge after a commit which workers are slow, and act on it."""
    if judge(turn):
        _mitigate(turn)


def keep_those_without_replacement(turn: Turn) -> None:
    """Keep a slow worker whose replacement is lost: it is better than a worker that runs two stages."""
    state = turn.state
    notices = state.membership.leaving
    leaving = [w for w in state.noticed if notices[w].replaced and not state.workers[w].released]
    if leaving and state.plan is not None and not planning_view(state, turn.now).spare():
        for worker in leaving:
            if state.plan.owned_by(worker):
                keep_worker(turn, worker)


def _mitigate(turn: Turn) -> None:
    state = turn.state
    worker = _worst(state)
    if worker is not None and _has_replacement(turn) and is_free(state):
        _replace(turn, worker)
        return
    seen_slow = state.stragglers.slow
    look_after(
        turn,
        suspected=any(not seen.lasting for seen in seen_slow.values()),
        slow=[describe(one, seen) for one, seen in seen_slow.items() if seen.found],
    )
    _ask_for_one_more(turn, worker)


def _ask_for_one_more(turn: Turn, worker: WorkerId | None) -> None:
    """Request one worker more than the job has, where no split helps, for a limited time."""
    state, known = turn.state, turn.state.stragglers
    if known.asked_at is not None:
        late = turn.now - known.asked_at > ASKING_SECONDS and state.membership.requested > 0
        if worker is None or late:
            turn.put(replace(known, asked_at=None))
        if worker is not None and late:
            why = f"no worker has come within {ASKING_SECONDS:g} s to take its place"
            turn.do(Emit("StragglerKept", f"{worker} stays: {why}", True))
        return
    busy = state.splits.uneven or state.membership.requested or not is_free(state)
    if worker is None or busy or turn.now < known.again_at or not known.slow[worker].compared or _has_enough(state):
        return
    gain = _held_up_by(state, known.slow[worker])
    if gain >= WORTH * (state.usual_step or 0.0) and pays(state, gain):
        turn.put(replace(known, asked_at=turn.now, again_at=turn.now + REST_SECONDS))
        text = f"one more worker is asked for, to take the place of {worker}: {describe(worker, known.slow[worker])}"
        turn.do(Emit("StragglerReplacementRequested", text))


def _held_up_by(state: CoordinatorState, slow: Straggler) -> float:
    """Return the seconds by which a step would be shorter with a worker of usual speed in its place.

    Nothing is gained if other stages take as long, since the layers were split by speed. 0 until all stages are
    measured.
    """
    plan, times = state.current_plan, owned_times(state)
    if len(times) < len(plan.cells()):
        return 0.0
    now = {cell: seconds_of(measured) for cell, measured in times.items()}
    shares = [len(part) for part in plan.target.split]

    def taken(seconds: Mapping[Cell, float]) -> float:
        rows = [[seconds[Cell(d, s)] for s in range(len(plan.stages))] for d in range(len(shares))]
        return step_seconds(rows, shares, state.spec.worker.devices)

    return taken(now) - taken({**now, slow.cell: slow.usual})


def _worst(state: CoordinatorState) -> WorkerId | None:
    """Return the lasting straggler that loses the most time; None if there is none."""
    slow = {w: s for w, s in state.stragglers.slow.items() if s.lasting and w in state.workers}
    return max(slow, key=lambda w: (slow[w].seconds - slow[w].usual, w), default=None)


def _has_replacement(turn: Turn) -> bool:
    """Return whether a standby is free to replace a worker."""
    state, plan = turn.state, turn.state.current_plan
    owners = [plan.at(cell).owner for cell in plan.cells()]
    alone = len(set(owners)) == len(owners)
    return not _has_enough(state) and alone and bool(planning_view(state, turn.now).spare())


def _has_enough(state: CoordinatorState) -> bool:
    """Return whether as many workers have been replaced as the job has."""
    return state.stragglers.replacements >= wanted_workers(state.spec)


def _replace(turn: Turn, worker: WorkerId) -> None:
    known, plan = turn.state.stragglers, turn.state.current_plan
    seen = known.slow[worker]
    # if the next worker takes as long for these layers, the layers are slow
    replaced = {**known.replaced, (worker, plan.stages[seen.cell.stage]): seen.seconds}
    turn.put(replace(known, replaced=replaced, replacements=known.replacements + 1, asked_at=None))
    replace_worker(turn, worker)
    turn.do(Emit("StragglerReplaced", f"a standby takes the place of {worker}: {describe(worker, seen)}"))
