"""Workers that are slow, not dead: found, shown with their figures, replaced or given fewer layers.

Each worker says what it takes for a microbatch of its layers (`worker_speeds`); waits are not in that. A straggler
takes longer by a factor than others would, for `elastic.stabilizationSeconds` and some steps, and holds the job up by
that. If another worker stands by, it takes its place, as if the slow one had a notice. Else the layers are split anew,
if that is expected to make steps shorter by enough and to pay before the job ends; so they are if layers take longer
than was counted. Whatever is done, the next time is twice as far away: a job all of whose workers are slow in turn is
not moved about without end. See docs/design/stragglers.md.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from bamboo.coordinator.events import Emit
from bamboo.coordinator.membership import keep_worker, replace_worker
from bamboo.coordinator.planner import planning_view
from bamboo.coordinator.resplit import AHEAD_STEPS
from bamboo.coordinator.state import CoordinatorState, Straggler, StragglerState, Turn
from bamboo.coordinator.worker_speeds import (
    by_counted_costs,
    estimate,
    measurements,
    of_replaced,
    owned_times,
    seconds_of,
)
from bamboo.job.spec import StragglerPolicy, wanted_workers
from bamboo.planning.plan import Cell, WorkerId
from bamboo.planning.resplit import balanced, grid_of, keeps_its_seats
from bamboo.planning.speeds import Speeds, WorkEstimate, speeds
from bamboo.planning.uneven_split import Ranges, step_seconds

LOOK_SECONDS: Final = 1.0  # from one look to the next, at least
FAMILIAR_STEPS: Final = 3  # committed under a plan before anybody is judged
LEAST_STEPS: Final = 10  # for which a worker must have been slow, beside stabilizationSeconds
SLOWER: Final = 1.3  # than others, from which factor on it is a straggler,
STILL_SLOWER: Final = 1.15  # and down to which it stays one
SLOWER_BY_COSTS: Final = 2.0  # than the counted costs of its layers say, if there is nobody with the same work
STILL_SLOWER_BY_COSTS: Final = 1.5
ALIKE: Final = 1.2  # figures that differ by less are not told anew
NOTICEABLE: Final = 0.1  # of a step: who holds it up by less is left alone; half of it, once it is a straggler
WORTH: Final = 0.1  # of a step: by which it must become shorter for the layers to be split anew
PAYS: Final = 2.0  # times the pause must come back before the job ends
BYTES_PER_SECOND: Final = 1e8  # at which layers are taken to move, until one move has been seen
BACKOFF_STEPS: Final = 20  # from one measure to the next, or stabilizationSeconds; twice as many after each
MOST_DOUBLINGS: Final = 16


def look(turn: Turn) -> None:
    """After a commit: judge anew who is slow, and do what is to be done about it."""
    state = turn.state
    if state.spec.elastic.straggler_policy is StragglerPolicy.IGNORE:
        if state.stragglers != StragglerState():
            turn.set(stragglers=StragglerState())
        return
    known = state.stragglers
    if turn.now < known.looked_at + LOOK_SECONDS or not _is_familiar(state):
        return
    measured, before = measurements(state), of_replaced(state)
    found = speeds(measured)
    slow = _judged(state, speeds([*measured, *before]) if before else found, turn.now)
    newest = estimate(state, found) or known.estimate
    turn.set(
        stragglers=replace(known, looked_at=turn.now, estimate=newest, slow=slow)
    )  # fmt: skip
    _tell(turn, known.slow)
    if state.spec.elastic.straggler_policy is StragglerPolicy.MITIGATE:
        _mitigate(turn)


def keep_those_without_replacement(turn: Turn) -> None:
    """A slow worker is better than one that runs two stages: it stays if who was to take its place is lost."""
    state = turn.state
    leaving = [w for w, r in state.workers.items() if r.replaced and not r.released]
    if leaving and state.plan is not None and not planning_view(state, turn.now).spare():
        for worker in leaving:
            if state.plan.owned_by(worker):
                keep_worker(turn, worker)


def _is_familiar(state: CoordinatorState) -> bool:
    """Does the job train under a plan that is some steps old, with nothing on its way?"""
    plan = state.plan
    if state.phase != "Running" or plan is None or state.usual_step is None or state.step >= state.spec.training.steps:
        return False
    old = state.step >= state.planned_step + FAMILIAR_STEPS and state.generation == plan.target.generation
    return old and len(plan.layouts) == 1 and not plan.sources and state.resplit is None


# who is slow


def _judged(state: CoordinatorState, found: Speeds, now: float) -> dict[WorkerId, Straggler]:
    """Those who are, and since when. Who has not measured its stage yet is taken for what it was."""
    plan, before, times = state.plan, state.stragglers.slow, owned_times(state)
    assert plan is not None
    by_costs, slow = by_counted_costs(state), {}
    for cell in plan.cells():
        worker = plan.at(cell).owner
        if cell not in times:
            slow.update({worker: before[worker]} if worker in before else {})
            continue
        excess = found.excess(worker)
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
    assert state.plan is not None
    assert state.usual_step is not None
    if seen.compared:
        limit = STILL_SLOWER if known else SLOWER
    else:
        limit = STILL_SLOWER_BY_COSTS if known else SLOWER_BY_COSTS
    longer = (seen.seconds - seen.usual) * len(state.plan.target.split[seen.cell.pipeline])
    return seen.seconds >= limit * seen.usual and longer >= NOTICEABLE * state.usual_step * (0.5 if known else 1.0)


def _grown(state: CoordinatorState, seen: Straggler, before: Straggler | None, now: float) -> Straggler:
    """What is known of it by now, if something was before."""
    if before is None:
        return seen
    if before.found and before.cell == seen.cell and _is_alike(before.seconds, seen.seconds, before.usual, seen.usual):
        return before
    lasting = _lasts(state, (before.since, before.step), now)
    return replace(seen, since=before.since, step=before.step, found=before.found or lasting)


def _is_alike(*figures: float) -> bool:
    """Of pairs of figures: is each one nearly as the other? Then what people are told does not change all the time."""
    pairs = zip(figures[::2], figures[1::2], strict=True)
    return all(max(pair) <= ALIKE * min(pair) for pair in pairs)


def _lasts(state: CoordinatorState, since: tuple[float, int], now: float) -> bool:
    """Has it been so for long enough? since: when, and at which step."""
    seconds, step = since
    return now - seconds >= state.spec.elastic.stabilization_seconds and state.step - step >= LEAST_STEPS


def _tell(turn: Turn, before: Mapping[WorkerId, Straggler]) -> None:
    slow, plan = turn.state.stragglers.slow, turn.state.plan
    assert plan is not None
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
    if worker is not None and _may_act(state, turn.now) and _has_replacement(turn):
        _replace(turn, worker)
        return
    _watch_split(turn)


def _worst(state: CoordinatorState) -> WorkerId | None:
    """Of the stragglers that are found, the one that would gain most."""
    slow = {w: s for w, s in state.stragglers.slow.items() if s.found and w in state.workers}
    return max(slow, key=lambda w: (slow[w].seconds - slow[w].usual, w), default=None)


def _may_act(state: CoordinatorState, now: float) -> bool:
    """Is nothing going on, and was the last measure long enough ago?"""
    plan, known = state.plan, state.stragglers
    assert plan is not None
    ending = state.step + 2 * AHEAD_STEPS >= state.spec.training.steps
    leaving = any(r.notice_until is not None and not r.released for r in state.workers.values())
    if ending or leaving or state.stopping or state.resize or plan.worker_ids() - state.applied:
        return False
    pause = max(state.spec.elastic.stabilization_seconds, BACKOFF_STEPS * (state.usual_step or 0.0))
    doublings = min(known.actions - 1, MOST_DOUBLINGS)
    return not known.actions or now - known.acted_at >= pause * 2**doublings


def _has_replacement(turn: Turn) -> bool:
    """Does a worker stand by that is not needed elsewhere?"""
    state, plan = turn.state, turn.state.plan
    assert plan is not None
    owners = [plan.at(cell).owner for cell in plan.cells()]
    enough = state.stragglers.replacements >= wanted_workers(state.spec)
    return not enough and len(set(owners)) == len(owners) and bool(planning_view(state, turn.now).spare())


def _replace(turn: Turn, worker: WorkerId) -> None:
    """What it took is remembered: if the next one takes as long, it was not the worker."""
    known, plan = turn.state.stragglers, turn.state.plan
    assert plan is not None
    seen = known.slow[worker]
    replaced = {**known.replaced, (worker, plan.stages[seen.cell.stage]): seen.seconds}
    turn.set(
        stragglers=replace(
            known, replaced=replaced, actions=known.actions + 1, replacements=known.replacements + 1, acted_at=turn.now,
            uneven=None, better="",
        )
    )  # fmt: skip
    replace_worker(turn, worker)
    turn.do(Emit("StragglerReplaced", f"a worker that stands by takes the place of {worker}: {told(worker, seen)}"))


def _watch_split(turn: Turn) -> None:
    """Note since when another split of the layers is expected to be faster, and wish for it once that lasts."""
    state, known = turn.state, turn.state.stragglers
    expected = _expected(state)
    if expected is None:
        if known.uneven or known.better:
            turn.set(stragglers=replace(known, uneven=None, better=""))
        return
    since = known.uneven or (turn.now, state.step)
    suspected = any(not seen.found for seen in known.slow.values())  # it may be over soon, or be replaced
    ripe = _lasts(state, since, turn.now) and _may_act(state, turn.now) and not suspected
    before, after = expected
    slow = [told(worker, seen) for worker, seen in known.slow.items() if seen.found]
    why = "; ".join(slow) or "layers take other times than their counted costs say"
    text = f"the layers are split anew, so that a step takes {after:.3g} s instead of {before:.3g} s or so: {why}"
    turn.set(stragglers=replace(known, uneven=since, better=text if ripe else ""))


def _expected(state: CoordinatorState) -> tuple[float, float] | None:
    """Seconds of a step as it is, and with the best split for these workers; None if that is not worth its pause, or if
    there is no memory for it.
    """
    plan, work, step = state.plan, state.stragglers.estimate, state.usual_step
    assert plan is not None
    live = state.live(plan)
    fixed = state.spec.topology.split is not None or len(plan.stages) in (1, plan.stages[-1][1])
    if work is None or step is None or fixed or not keeps_its_seats(plan, live, live, grid_of(plan)):
        return None
    if len(owned_times(state)) < len(plan.cells()):
        return None
    shares = [len(part) for part in plan.target.split]
    now, least = _computing(state, work, plan.stages), max(step, 1e-9)
    weights = [
        max(shares[d] * _slowness(state, work, d, s) for d in range(len(shares))) for s in range(len(plan.stages))
    ]
    ideal = sum(work.costs) / sum(1 / weight for weight in weights)  # no split can have a shorter longest stage
    if now - ideal < WORTH * least:
        return None
    stages = balanced(plan, state.spec, work)
    gain, left = now - _computing(state, work, stages), state.spec.training.steps - state.step
    if not _has_memory(state, stages) or gain < WORTH * least or gain * left < PAYS * _pause(state):
        return None
    return step, step - gain


def _has_memory(state: CoordinatorState, stages: Ranges) -> bool:
    """Can each worker that knows its limit hold what it would have with that split? As if all layers took the same."""
    plan = state.plan
    assert plan is not None
    for worker, record in state.workers.items():
        held = {c.stage for c in plan.cells() if worker in plan.at(c).holders}
        now, then = (sum(end - first for s, (first, end) in enumerate(x) if s in held) for x in (plan.stages, stages))
        if record.headroom is not None and then > now * max(1.0, record.headroom):
            return False
    return True


def _computing(state: CoordinatorState, work: WorkEstimate, stages: Ranges) -> float:
    """Seconds of a step's computing with that split, by the same workers."""
    plan = state.plan
    assert plan is not None
    fixed = work.fixed(len(stages))
    seconds = [fixed[s] + sum(work.costs[first:end]) for s, (first, end) in enumerate(stages)]
    rows = [[t * _slowness(state, work, d, s) for s, t in enumerate(seconds)] for d in range(len(plan.pipelines))]
    return step_seconds(rows, [len(part) for part in plan.target.split])


def _slowness(state: CoordinatorState, work: WorkEstimate, pipeline: int, stage: int) -> float:
    assert state.plan is not None
    return work.slowness.get(state.plan.at(Cell(pipeline, stage)).owner, 1.0)


def _pause(state: CoordinatorState) -> float:
    """Seconds for which a split stops the job: as long as the last one did, else by what its workers hold."""
    if state.stragglers.pause is not None:
        return state.stragglers.pause
    held = [r.memory.parameters + r.memory.optimizer + r.memory.replica for r in state.workers.values() if r.memory]
    return (state.usual_step or 0.0) + max(held, default=0) / BYTES_PER_SECOND
