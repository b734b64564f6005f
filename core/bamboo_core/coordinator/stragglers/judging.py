"""Detection of slow workers, from the time that each reports for a microbatch of its layers, without waits.

A straggler takes longer than others by a factor, for `elastic.stabilizationSeconds` and some steps, and thereby delays
the job. See docs/design/stragglers.md.
"""

from collections.abc import Mapping
from typing import Final

from bamboo_core.coordinator.events import Emit
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.splits.by_speed import WORTH, lasts
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
from bamboo_core.coordinator.stragglers.record import Straggler
from bamboo_core.planning.plan import WorkerId
from bamboo_core.planning.splits.speeds import Speeds, speeds

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
    """Judge after a commit which workers are slow, and report new ones. Return False if it is not time for that."""
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
    _tell(turn, known.slow)
    return True


def _is_familiar(state: CoordinatorState) -> bool:
    """Return whether the job trains undisturbed under a plan that is some steps old."""
    plan = state.plan
    if state.phase != "Running" or plan is None or state.usual_step is None or state.step >= state.spec.training.steps:
        return False
    old = state.step >= state.plans.since_step + FAMILIAR_STEPS and state.progress.generation == plan.target.generation
    return old and len(plan.layouts) == 1 and not plan.sources and state.splits.resplit is None


def _is_settling(state: CoordinatorState) -> bool:
    """Return whether the plan is so new that forwards of replicas may not be timed yet."""
    return state.step < state.plans.since_step + SETTLING_STEPS


def _judged(state: CoordinatorState, all_speeds: Speeds, now: float) -> dict[WorkerId, Straggler]:
    """Return the slow workers, and since when. A worker not measured or comparable yet keeps its earlier judgement."""
    plan, before, times = state.current_plan, state.stragglers.slow, owned_times(state)
    by_costs, slow = by_counted_costs(state), {}
    for cell in plan.cells():
        worker = plan.at(cell).owner
        excess = all_speeds.excess(worker)
        earlier = before.get(worker)
        if cell not in times or (excess is None and earlier and earlier.compared and _is_settling(state)):
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
    """Return whether a worker is slow enough and delays the job; less suffices for a known straggler."""
    assert state.usual_step is not None
    if seen.compared:
        limit = STILL_SLOWER if known else SLOWER
    else:
        limit = STILL_SLOWER_BY_COSTS if known else SLOWER_BY_COSTS
    longer = (seen.seconds - seen.usual) * len(state.current_plan.target.split[seen.cell.pipeline])
    return seen.seconds >= limit * seen.usual and longer >= WORTH * state.usual_step * (0.5 if known else 1.0)


def _grown(state: CoordinatorState, seen: Straggler, before: Straggler | None, now: float) -> Straggler:
    """Return the straggler with its earlier history."""
    if before is None:
        return seen
    since = (before.since, before.step)
    found = before.found or lasts(state, since, now, SHOWN_AFTER_SECONDS)
    lasting = before.lasting or lasts(state, since, now)
    alike = before.cell == seen.cell and _is_alike(before.seconds, seen.seconds, before.usual, seen.usual)
    figures = before if before.found and alike else replace(seen, since=before.since, step=before.step)
    return replace(figures, found=found, lasting=lasting)


def _is_alike(*figures: float) -> bool:
    """Return whether consecutive pairs of figures are nearly equal, so that the shown text stays the same."""
    pairs = zip(figures[::2], figures[1::2], strict=True)
    return all(max(pair) <= ALIKE * min(pair) for pair in pairs)


def _tell(turn: Turn, before: Mapping[WorkerId, Straggler]) -> None:
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
