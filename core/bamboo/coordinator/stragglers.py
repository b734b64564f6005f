"""Workers that are slow, not dead: found, shown with their figures, replaced or given fewer layers.

Each worker says what it takes for a microbatch of its layers (`worker_speeds`); waits are not in that. A straggler
takes longer by a factor than others would, for `elastic.stabilizationSeconds` and some steps, and holds the job up by
that. If another worker stands by, it takes its place, as if the slow one had a notice. Else the layers are split anew
(`rebalancing`), if that pays; so they are if layers take longer than was counted. Where no split helps, one worker more
is asked for, which then takes the place of the slow one. Whatever does not last makes the next time farther away: a job
all of whose workers are slow in turn is not moved about without end. See docs/design/stragglers.md.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from bamboo.coordinator.events import Emit
from bamboo.coordinator.planner import planning_view
from bamboo.coordinator.splits.rebalancing import (
    FAMILIAR_STEPS,
    WORTH,
    acted,
    is_free,
    is_settling,
    lasts,
    look_after,
    may_act,
    pays,
)
from bamboo.coordinator.splits.record import Straggler, StragglerState
from bamboo.coordinator.splits.worker_speeds import (
    by_counted_costs,
    estimate,
    measurements,
    of_earlier,
    of_replaced,
    own_paces,
    owned_times,
    seconds_of,
)
from bamboo.coordinator.state import CoordinatorState, Turn
from bamboo.coordinator.workers.membership import keep_worker, replace_worker
from bamboo.job.spec import StragglerPolicy, wanted_workers
from bamboo.planning.plan import Cell, WorkerId
from bamboo.planning.splits.speeds import Speeds, speeds
from bamboo.planning.splits.uneven_split import step_seconds

LOOK_SECONDS: Final = 1.0  # from one look to the next, at least
SLOWER: Final = 1.3  # than others, from which factor on it is a straggler,
STILL_SLOWER: Final = 1.15  # and down to which it stays one
SLOWER_BY_COSTS: Final = 2.0  # than the counted costs of its layers say, if there is nobody with the same work
STILL_SLOWER_BY_COSTS: Final = 1.5
TOLD_SECONDS: Final = 15.0  # for which a straggler must have been slow to be told of, if less than is waited to act
ALIKE: Final = 1.2  # figures that differ by less are not told anew
ASKING_SECONDS: Final = 600.0  # for a worker that is to take the place of a slow one, until it has joined
NOTICEABLE: Final = 0.1  # of a step: who holds it up by less is left alone; half of it, once it is a straggler


def look(turn: Turn) -> None:
    """After a commit: judge anew who is slow, and do what is to be done about it."""
    state = turn.state
    ignored = state.spec.elastic.straggler_policy is StragglerPolicy.IGNORE
    if ignored and not state.spec.elastic.chooses_grid:  # which goes by what layers take
        if state.stragglers != StragglerState():
            turn.set(stragglers=StragglerState())
        return
    known = state.stragglers
    if turn.now < known.looked_at + LOOK_SECONDS or not _is_familiar(state):
        return
    measured, before, paces = measurements(state), of_replaced(state), own_paces(state)
    among_others = speeds([*measured, *before])
    alone = [worker for worker, _ in paces if not among_others.others.get(worker)]
    measured += of_earlier(paces, alone)
    found = speeds(measured)
    slow = {} if ignored else _judged(state, speeds([*measured, *before]) if before else found, turn.now)
    newest = estimate(state, found) or known.estimate
    turn.set(stragglers=replace(known, looked_at=turn.now, estimate=newest, slow=slow, paces=paces))
    _tell(turn, known.slow)
    if state.spec.elastic.straggler_policy is StragglerPolicy.MITIGATE:
        _mitigate(turn)
    elif known.asked_at is not None:
        turn.set(stragglers=replace(turn.state.stragglers, asked_at=None))


def keep_those_without_replacement(turn: Turn) -> None:
    """A slow worker is better than one that runs two stages: it stays if who was to take its place is lost."""
    state = turn.state
    leaving = state.roster.replaced
    if leaving and state.plan is not None and not planning_view(state, turn.now).spare():
        for worker in leaving:
            if state.plan.owned_by(worker):
                keep_worker(turn, worker)


def _is_familiar(state: CoordinatorState) -> bool:
    """Does the job train under a plan that is some steps old, with nothing on its way?"""
    plan = state.plan
    if state.phase != "Running" or plan is None or state.usual_step is None or state.step >= state.spec.training.steps:
        return False
    old = state.step >= state.plans.since_step + FAMILIAR_STEPS and state.progress.generation == plan.target.generation
    return old and len(plan.layouts) == 1 and not plan.sources and state.splits.resplit is None


# who is slow


def _judged(state: CoordinatorState, found: Speeds, now: float) -> dict[WorkerId, Straggler]:
    """Those who are, and since when. Who has not measured its stage yet, or cannot be compared yet, is what it was."""
    plan, before, times = state.current_plan, state.stragglers.slow, owned_times(state)
    by_costs, slow = by_counted_costs(state), {}
    for cell in plan.cells():
        worker = plan.at(cell).owner
        excess = found.excess(worker)
        earlier = before.get(worker)
        if cell not in times or (excess is None and earlier and earlier.compared and is_settling(state)):
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
    return seen.seconds >= limit * seen.usual and longer >= NOTICEABLE * state.usual_step * (0.5 if known else 1.0)


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
    """Of pairs of figures: is each one nearly as the other? Then what people are told does not change all the time."""
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


# what is done


def _mitigate(turn: Turn) -> None:
    state = turn.state
    worker = _worst(state)
    if worker is not None and _has_replacement(turn):
        known = state.stragglers
        turn.set(stragglers=replace(known, backoff=known.backoff.wanted(turn.now)))
        if may_act(state, turn.now) or (known.asked_at is not None and is_free(state)):
            _replace(turn, worker)
            return
    seen_slow = state.stragglers.slow
    look_after(
        turn,
        suspected=any(not seen.lasting for seen in seen_slow.values()),
        slow=[told(one, seen) for one, seen in seen_slow.items() if seen.found],
    )
    _ask_for_one_more(turn, worker)


def _ask_for_one_more(turn: Turn, worker: WorkerId | None) -> None:
    """Where no split of the layers helps: a worker beyond those that the job has. Not for ever, as none may come."""
    state, known = turn.state, turn.state.stragglers
    if known.asked_at is not None:
        late = turn.now - known.asked_at > ASKING_SECONDS and state.membership.requested > 0
        if worker is None or late:
            turn.set(stragglers=replace(known, asked_at=None))
        if worker is not None and late:
            why = f"no worker has come within {ASKING_SECONDS:g} s to take its place"
            turn.do(Emit("StragglerKept", f"{worker} stays: {why}", True))
        return
    split = known.uneven or known.better or known.trial or known.unpaid
    if worker is None or split or state.membership.requested or _has_enough(state) or not known.slow[worker].compared:
        return
    gain = _held_up_by(state, known.slow[worker])
    if gain < WORTH * (state.usual_step or 0.0) or not pays(state, gain):
        return
    turn.set(stragglers=replace(known, backoff=known.backoff.wanted(turn.now)))
    if may_act(turn.state, turn.now):
        turn.set(stragglers=replace(acted(turn), asked_at=turn.now))
        text = f"one more worker is asked for, to take the place of {worker}: {told(worker, known.slow[worker])}"
        turn.do(Emit("StragglerReplacementRequested", text))


def _held_up_by(state: CoordinatorState, slow: Straggler) -> float:
    """By how many seconds a step would be shorter with a worker of usual speed in its place. Stages that are as long
    as its own, since layers were split by speed, leave nothing to be gained. 0 while not all is measured.
    """
    plan, times = state.current_plan, owned_times(state)
    if len(times) < len(plan.cells()):
        return 0.0
    now = {cell: seconds_of(found) for cell, found in times.items()}
    shares = [len(part) for part in plan.target.split]

    def taken(seconds: Mapping[Cell, float]) -> float:
        rows = [[seconds[Cell(d, s)] for s in range(len(plan.stages))] for d in range(len(shares))]
        return step_seconds(rows, shares, state.spec.worker.devices)

    return taken(now) - taken({**now, slow.cell: slow.usual})


def _worst(state: CoordinatorState) -> WorkerId | None:
    """Of the stragglers that have been slow for long enough, the one that would gain most."""
    slow = {w: s for w, s in state.stragglers.slow.items() if s.lasting and w in state.workers}
    return max(slow, key=lambda w: (slow[w].seconds - slow[w].usual, w), default=None)


def _has_replacement(turn: Turn) -> bool:
    """Does a worker stand by that is not needed elsewhere?"""
    state, plan = turn.state, turn.state.current_plan
    owners = [plan.at(cell).owner for cell in plan.cells()]
    alone = len(set(owners)) == len(owners)
    return not _has_enough(state) and alone and bool(planning_view(state, turn.now).spare())


def _has_enough(state: CoordinatorState) -> bool:
    """Have as many workers been replaced as the job has?"""
    return state.stragglers.replacements >= wanted_workers(state.spec)


def _replace(turn: Turn, worker: WorkerId) -> None:
    """What it took is remembered: if the next one takes as long, it was not the worker."""
    known, plan = turn.state.stragglers, turn.state.current_plan
    seen = known.slow[worker]
    replaced = {**known.replaced, (worker, plan.stages[seen.cell.stage]): seen.seconds}
    done = acted(turn) if known.asked_at is None else known  # to ask for it was the measure
    turn.set(stragglers=replace(done, replaced=replaced, replacements=known.replacements + 1, asked_at=None))
    replace_worker(turn, worker)
    turn.do(Emit("StragglerReplaced", f"a worker that stands by takes the place of {worker}: {told(worker, seen)}"))
