"""Detection and mitigation of stragglers (slow workers).

Each worker reports the time that it takes for a microbatch of its layers, without waits. A straggler takes longer than
others, or than before, by a factor, for `elastic.stabilizationSeconds` and some steps, and thereby delays the job.

A standby takes the place of a slow worker, as if the slow worker had a preemption notice. Without a standby, the layers
are split anew (`by_speed`) if that pays, even if layers, not workers, are slow. Where no split helps, the coordinator
requests one more worker as a replacement. Limits keep a job whose workers become slow one after the other from being
rearranged forever: in `REST_SECONDS` the coordinator requests at most one worker and splits anew at most once for the
same workers, and it replaces at most as many workers as the job has. See docs/design/stragglers.md.
"""

from collections.abc import Mapping
from typing import Final

from bamboo_core.coordinator.events import Emit
from bamboo_core.coordinator.planner import planning_view
from bamboo_core.coordinator.records.workers import Notice, Straggler
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.splits.by_speed import REST_SECONDS, WORTH, is_free, lasts, look_after, pays
from bamboo_core.coordinator.splits.worker_speeds import (
    by_counted_costs,
    estimate,
    measurements,
    of_earlier,
    of_replaced,
    own_paces,
    owned_times,
    seconds_of,
)
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.job.spec import wanted_workers
from bamboo_core.planning.plan import Cell, WorkerId
from bamboo_core.planning.splits.speeds import Speeds, speeds, step_seconds

FAMILIAR_STEPS: Final = 3  # committed under a plan before workers are judged
SETTLING_STEPS: Final = 40  # committed under a plan until earlier comparisons are possible again
LOOK_SECONDS: Final = 1.0  # at least, between judgements
SLOWER: Final = 1.3  # factor from which a worker is a straggler,
STILL_SLOWER: Final = 1.15  # and down to which it stays one
SLOWER_BY_COSTS: Final = 2.0  # the same by the counted costs of its layers, if no worker has the same work
STILL_SLOWER_BY_COSTS: Final = 1.5
SHOWN_AFTER_SECONDS: Final = 15.0  # of slowness until a straggler is shown, if shorter than the wait to act
ALIKE: Final = 1.2  # factor below which changed figures are not shown anew


def judge(turn: Turn) -> bool:
    """Decide which workers are slow, report changes and return True; if it is too soon to judge, only return False."""
    state = turn.state
    known = state.stragglers
    if turn.now < known.looked_at + LOOK_SECONDS or not _is_familiar(state):
        return False
    measured, before, paces = measurements(state), of_replaced(state), own_paces(state)
    among_others = speeds([*measured, *before])
    alone = [worker for worker, _ in paces if not among_others.others.get(worker)]
    earlier = of_earlier(paces, alone)
    measured += earlier
    all_speeds = speeds(measured) if earlier or before else among_others
    slow = _judged(state, speeds([*measured, *before]) if before else all_speeds, turn.now)
    work = estimate(state, all_speeds) or known.estimate  # None if it does not cover all layers
    turn.put(replace(known, slow=slow, paces=paces, estimate=work, looked_at=turn.now))
    _report(turn, known.slow)
    return True


def _is_familiar(state: CoordinatorState) -> bool:
    """Return whether the job trains undisturbed under a plan that is some steps old."""
    plan = state.plan
    if state.phase != "Running" or plan is None or state.usual_step is None or state.step >= state.spec.training.steps:
        return False
    old = state.step >= state.plans.since_step + FAMILIAR_STEPS and state.progress.generation == plan.target.generation
    return old and len(plan.layouts) == 1 and not plan.sources and state.splits.resplit is None


def _judged(state: CoordinatorState, all_speeds: Speeds, now: float) -> dict[WorkerId, Straggler]:
    """Return the slow workers. A worker that is not measured, or not comparable yet, keeps its earlier record."""
    plan, before, times = state.current_plan, state.stragglers.slow, owned_times(state)
    by_costs, slow = by_counted_costs(state), {}
    settling = state.step < state.plans.since_step + SETTLING_STEPS  # forwards of replicas may not be timed yet
    for cell in plan.cells():
        worker = plan.at(cell).owner
        excess = all_speeds.excess(worker)
        earlier = before.get(worker)
        if cell not in times or (excess is None and earlier and earlier.compared and settling):
            slow.update({worker: earlier} if earlier else {})
            continue
        factor, compared = (by_costs.get(worker, 1.0), False) if excess is None else (excess, True)
        seconds = seconds_of(times[cell])
        seen = Straggler(
            since=now, step=state.step, cell=cell, seconds=seconds, usual=seconds / factor, compared=compared
        )
        if _is_slow(state, seen, known=worker in before):
            slow[worker] = _grown(state, seen, before.get(worker), now)
    return slow


def _is_slow(state: CoordinatorState, seen: Straggler, *, known: bool) -> bool:
    """Return whether a worker is a straggler: slower than usual by a factor, and by enough to delay steps. known: the
    worker already counts as a straggler, so lower limits apply.
    """
    assert state.usual_step is not None
    if seen.compared:
        limit = STILL_SLOWER if known else SLOWER
    else:
        limit = STILL_SLOWER_BY_COSTS if known else SLOWER_BY_COSTS
    longer = (seen.seconds - seen.usual) * len(state.current_plan.target.split[seen.cell.pipeline])
    return seen.seconds >= limit * seen.usual and longer >= WORTH * state.usual_step * (0.5 if known else 1.0)


def _grown(state: CoordinatorState, seen: Straggler, before: Straggler | None, now: float) -> Straggler:
    """Return a straggler's newest record: it keeps its start, and figures that were shown and have changed little."""
    if before is None:
        return seen
    since = (before.since, before.step)
    found = before.found or lasts(state, since, now, SHOWN_AFTER_SECONDS)
    lasting = before.lasting or lasts(state, since, now)
    pairs = ((before.seconds, seen.seconds), (before.usual, seen.usual))
    alike = before.cell == seen.cell and all(max(pair) <= ALIKE * min(pair) for pair in pairs)
    figures = before if before.found and alike else replace(seen, since=before.since, step=before.step)
    return replace(figures, found=found, lasting=lasting)


def _report(turn: Turn, before: Mapping[WorkerId, Straggler]) -> None:
    slow, plan = turn.state.stragglers.slow, turn.state.current_plan
    for worker, seen in slow.items():
        if seen.found and not (worker in before and before[worker].found):
            turn.do(Emit("StragglerFound", describe(worker, seen), True))
    for worker, known in before.items():
        if known.found and worker not in slow and worker in turn.state.workers and plan.owned_by(worker):
            turn.do(Emit("StragglerRecovered", f"{worker} is no longer slower than others"))


def describe(worker: WorkerId, seen: Straggler) -> str:
    """Describe a straggler and its times."""
    d, s = seen.cell
    whose = "others would take" if seen.compared else "by the counted cost of its layers others would take"
    own, usual = (f"{seconds * 1e3:.3g} ms" for seconds in (seen.seconds, seen.usual))
    return f"{worker} takes {own} for a microbatch of stage {s} of pipeline {d}; {whose} {usual}"


ASKING_SECONDS: Final = 600.0  # limit until a requested replacement has joined


def look(turn: Turn) -> None:
    """Decide after a commit which workers are slow, and act: replace the slowest one, split the layers anew, or request
    one more worker.
    """
    if not judge(turn):
        return
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


def keep_those_without_replacement(turn: Turn) -> None:
    """Withdraw the notice of a slow worker whose replacement is lost: otherwise a worker would run two stages."""
    state = turn.state
    notices = state.membership.leaving
    leaving = [w for w in state.noticed if notices[w].replaced and not state.workers[w].released]
    if leaving and state.plan is not None and not planning_view(state, turn.now).spare():
        for worker in leaving:
            if state.plan.owned_by(worker):
                turn.put(turn.state.membership.not_leaving(worker))


def _ask_for_one_more(turn: Turn, worker: WorkerId | None) -> None:
    """Request one more worker, to replace this straggler, if no split helps; withdraw the request when it is not needed
    or has taken too long.
    """
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
    """Return the seconds by which a step would be shorter with a worker of usual speed in the straggler's place.

    The result is 0 until all stages are measured, and if other stages take as long, as after a split by speed.
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
    """Return whether to replace a straggler: a standby is free, no worker runs two stages, the limit is not reached."""
    state, plan = turn.state, turn.state.current_plan
    owners = [plan.at(cell).owner for cell in plan.cells()]
    alone = len(set(owners)) == len(owners)
    return not _has_enough(state) and alone and bool(planning_view(state, turn.now).spare())


def _has_enough(state: CoordinatorState) -> bool:
    """Return whether the limit of replacements is reached: as many as the job has workers."""
    return state.stragglers.replacements >= wanted_workers(state.spec)


def _replace(turn: Turn, worker: WorkerId) -> None:
    known, plan = turn.state.stragglers, turn.state.current_plan
    seen = known.slow[worker]
    # if the next worker takes as long for these layers, the layers are slow
    replaced = {**known.replaced, (worker, plan.stages[seen.cell.stage]): seen.seconds}
    turn.put(replace(known, replaced=replaced, replacements=known.replacements + 1, asked_at=None))
    turn.put(turn.state.membership.with_notice(worker, Notice(final=True, replaced=True)))
    turn.do(Emit("StragglerReplaced", f"a standby takes the place of {worker}: {describe(worker, seen)}"))
