"""Which workers are slow, by what each says that it takes for a microbatch of its layers (waits are not in that).

A straggler takes longer by a factor than others would, for `elastic.stabilizationSeconds` and some steps, and holds the
job up by that. See docs/design/stragglers.md.
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

FAMILIAR_STEPS: Final = 3  # committed under a plan before anything is judged
SETTLING_STEPS: Final = 40  # committed under a plan, in which who could be compared before can be again
LOOK_SECONDS: Final = 1.0  # from one look to the next, at least
SLOWER: Final = 1.3  # than others, from which factor on it is a straggler,
STILL_SLOWER: Final = 1.15  # and down to which it stays one
SLOWER_BY_COSTS: Final = 2.0  # than the counted costs of its layers say, if there is nobody with the same work
STILL_SLOWER_BY_COSTS: Final = 1.5
TOLD_SECONDS: Final = 15.0  # for which a straggler must have been slow to be told of, if less than is waited to act
ALIKE: Final = 1.2  # figures that differ by less are not told anew


def judge(turn: Turn) -> bool:
    """After a commit: judge anew who is slow, and tell of those who are new. False if it is not time for that."""
    state = turn.state
    known = state.stragglers
    if turn.now < known.looked_at + LOOK_SECONDS or not _is_familiar(state):
        return False
    measured, before, paces = measurements(state), of_replaced(state), own_paces(state)
    among_others = speeds([*measured, *before])
    alone = [worker for worker, _ in paces if not among_others.others.get(worker)]
    earlier = of_earlier(paces, alone)
    measured += earlier
    found = speeds(measured) if earlier or before else among_others
    slow = _judged(state, speeds([*measured, *before]) if before else found, turn.now)
    work = estimate(state, found) or known.estimate  # None if it does not cover all layers
    turn.put(replace(known, slow=slow, paces=paces, estimate=work, looked_at=turn.now))
    _tell(turn, known.slow)
    return True


def _is_familiar(state: CoordinatorState) -> bool:
    """Does the job train under a plan that is some steps old, with nothing on its way?"""
    plan = state.plan
    if state.phase != "Running" or plan is None or state.usual_step is None or state.step >= state.spec.training.steps:
        return False
    old = state.step >= state.plans.since_step + FAMILIAR_STEPS and state.progress.generation == plan.target.generation
    return old and len(plan.layouts) == 1 and not plan.sources and state.splits.resplit is None


def _is_settling(state: CoordinatorState) -> bool:
    """Is the plan so new that forwards of replicas may not have been timed yet?"""
    return state.step < state.plans.since_step + SETTLING_STEPS


def _judged(state: CoordinatorState, found: Speeds, now: float) -> dict[WorkerId, Straggler]:
    """Those who are, and since when. Who has not measured its stage yet, or cannot be compared yet, is what it was."""
    plan, before, times = state.current_plan, state.stragglers.slow, owned_times(state)
    by_costs, slow = by_counted_costs(state), {}
    for cell in plan.cells():
        worker = plan.at(cell).owner
        excess = found.excess(worker)
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
    """Is it slower by enough, and does it hold the job up by that? Somewhat less is enough for one that was."""
    assert state.usual_step is not None
    if seen.compared:
        limit = STILL_SLOWER if known else SLOWER
    else:
        limit = STILL_SLOWER_BY_COSTS if known else SLOWER_BY_COSTS
    longer = (seen.seconds - seen.usual) * len(state.current_plan.target.split[seen.cell.pipeline])
    return seen.seconds >= limit * seen.usual and longer >= WORTH * state.usual_step * (0.5 if known else 1.0)


def _grown(state: CoordinatorState, seen: Straggler, before: Straggler | None, now: float) -> Straggler:
    """What is known of it by now, if something was before."""
    if before is None:
        return seen
    since = (before.since, before.step)
    found = before.found or lasts(state, since, now, TOLD_SECONDS)
    lasting = before.lasting or lasts(state, since, now)
    alike = before.cell == seen.cell and _is_alike(before.seconds, seen.seconds, before.usual, seen.usual)
    figures = before if before.found and alike else replace(seen, since=before.since, step=before.step)
    return replace(figures, found=found, lasting=lasting)


def _is_alike(*figures: float) -> bool:
    """Is each of these figures nearly as the one that it is paired with? Figures come in pairs, one after the other.
    Then what people are told does not change all the time.
    """
    pairs = zip(figures[::2], figures[1::2], strict=True)
    return all(max(pair) <= ALIKE * min(pair) for pair in pairs)


def _tell(turn: Turn, before: Mapping[WorkerId, Straggler]) -> None:
    slow, plan = turn.state.stragglers.slow, turn.state.current_plan
    for worker, seen in slow.items():
        if seen.found and not (worker in before and before[worker].found):
            turn.do(Emit("StragglerFound", told(worker, seen), True))
    for worker, known in before.items():
        if known.found and worker not in slow and worker in turn.state.workers and plan.owned_by(worker):
            turn.do(Emit("StragglerRecovered", f"{worker} is not slower than others any more"))


def told(worker: WorkerId, seen: Straggler) -> str:
    """With its figures, for a person."""
    d, s = seen.cell
    whose = "others would take" if seen.compared else "by the counted cost of its layers others would take"
    own, usual = (f"{seconds * 1e3:.3g} ms" for seconds in (seen.seconds, seen.usual))
    return f"{worker} takes {own} for a microbatch of stage {s} of pipeline {d}; {whose} {usual}"
