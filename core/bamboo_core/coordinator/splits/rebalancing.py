"""Layers split anew over the same workers for the sake of speed; whether that pays is measured.

Another split is taken if it is expected to make steps shorter by enough, for long enough, and to be worth its pause.
What a step takes with it is compared with what it took before: if it is not better, the one before is taken again where
that pays, and what both took is remembered for as long as speeds are about the same. See docs/design/stragglers.md.
"""

from collections.abc import Sequence
from math import inf
from statistics import median
from typing import Final

from bamboo_core.coordinator.checkpointing.checkpoints import AHEAD_STEPS
from bamboo_core.coordinator.events import Emit
from bamboo_core.coordinator.grids import following
from bamboo_core.coordinator.splits.record import BalanceState
from bamboo_core.coordinator.splits.worker_speeds import owned_times
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.job.spec import stabilization_seconds
from bamboo_core.planning.plan import Cell
from bamboo_core.planning.splits.resplit import balanced, grid_of, keeps_its_seats
from bamboo_core.planning.splits.speeds import WorkEstimate
from bamboo_core.planning.splits.tried_splits import (
    Paces,
    Trial,
    TriedSplit,
    are_alike,
    are_less_known,
    comparable,
)
from bamboo_core.planning.splits.uneven_split import Ranges, step_seconds

FAMILIAR_STEPS: Final = 3  # committed under a plan before anything is judged
SETTLING_STEPS: Final = 40  # committed under a plan, in which who could be compared before can be again
LEAST_STEPS: Final = 10  # for which something must have lasted, beside stabilizationSeconds
WORTH: Final = 0.1  # of a step: by which it must become shorter for the layers to be split anew; half of it has paid
PAYS: Final = 2.0  # times the pause must come back, before the job ends or speeds change again
BYTES_PER_SECOND: Final = 1e8  # at which layers are taken to move, until one move has been seen
SHORTEST_STEPS: Final = 20  # from one measure to the next, or stabilizationSeconds


def may_act(state: CoordinatorState, now: float) -> bool:
    """Is nothing going on, and was the last measure long enough ago?"""
    return is_free(state) and state.balance.backoff.is_over(_shortest_wait(state), now)


def acted(turn: Turn) -> BalanceState:
    """What is known once something is done about speeds: a replacement or a split."""
    return turn.state.balance.acted(_shortest_wait(turn.state), turn.state.step, turn.now)


def decided(turn: Turn, split: Trial) -> None:
    """That one is made now: it is on trial, and what a step took until now is remembered."""
    before = TriedSplit(turn.state.current_plan.stages, split.paces, split.before)
    turn.put(acted(turn).on_trial(split, before))
    turn.do(Emit("Rebalancing", split.why))


def look_after(turn: Turn, *, suspected: bool, slow: Sequence[str]) -> None:
    """Judge the split that is on trial; else note since when another one is expected to be faster, and wish for it once
    that lasts.

    suspected: somebody may be slow, which may be over soon, or be met by a replacement. slow: who is, for a person.
    """
    turn.put(turn.state.balance.under(turn.state.current_plan.target.schedule))
    _judge(turn)
    state, known = turn.state, turn.state.balance
    split = _proposal(state, slow) if known.trial is None else None
    if split is None:
        turn.put(known.expecting_nothing())
        return
    since = known.uneven or (turn.now, state.step)
    lasting = lasts(state, since, turn.now) and not suspected
    ripe = lasting and may_act(state, turn.now)
    back = known.unpaid and is_free(state)
    if lasting:
        known = known.wanted(turn.now)
    turn.put(known.expecting(since, split if ripe or back else None))


def lasts(state: CoordinatorState, since: tuple[float, int], now: float, at_most: float = inf) -> bool:
    """Has it been so for `elastic.stabilizationSeconds`, or for at_most seconds if that is less, and for some steps?

    since: when, and at which step.
    """
    seconds, step = since
    wanted = min(at_most, stabilization_seconds(state.spec))
    return now - seconds >= wanted and state.step - step >= LEAST_STEPS


def is_settling(state: CoordinatorState) -> bool:
    """Is the plan so new that forwards of replicas may not have been timed yet?"""
    return state.step < state.plans.since_step + SETTLING_STEPS


def is_free(state: CoordinatorState) -> bool:
    """Is nothing going on, and is the job not about to end?"""
    plan = state.current_plan
    ending = state.step + 2 * AHEAD_STEPS >= state.spec.training.steps
    leaving = any(r.notice_until is not None and not r.released for r in state.workers.values())
    return not (
        ending or leaving or state.ending.stopping or state.grids.resize or plan.worker_ids() - state.plans.applied
    )


def _shortest_wait(state: CoordinatorState) -> float:
    return max(stabilization_seconds(state.spec), SHORTEST_STEPS * (state.usual_step or 0.0))


# whether a split pays


def _judge(turn: Turn) -> None:
    """Once enough steps are measured. If speeds are others by now, nothing can be said of it."""
    state, known = turn.state, turn.state.balance
    plan, trial, work = state.current_plan, known.trial, state.stragglers.estimate
    if trial is None:
        return
    if plan.stages != trial.stages or work is None:
        turn.put(known.without_trial())
        return
    if state.step < state.plans.since_step + FAMILIAR_STEPS + LEAST_STEPS:
        return
    paces, seconds = _paces(state, work), _recent_step(state)
    if are_less_known(paces, trial.paces) and is_settling(state):
        return
    measured = TriedSplit(plan.stages, paces, seconds)
    if not are_alike(paces, trial.paces):
        turn.put(known.judged(measured, unpaid=known.unpaid))
        return
    paid = seconds <= trial.before * (1 - WORTH / 2)
    turn.put(known.judged(measured, unpaid=not paid and not trial.known))
    figures = f"a step takes {seconds:.3g} s; {trial.promised:.3g} s were expected, and it took {trial.before:.3g} s"
    if paid:
        turn.do(Emit("Rebalanced", f"with the layers split anew {figures}"))
    else:
        turn.do(Emit("RebalancingDidNotPay", f"with the layers split anew {figures}", warning=True))


def _recent_step(state: CoordinatorState) -> float:
    """Seconds of a step: the median of the newest ones."""
    return median(state.progress.step_seconds[-LEAST_STEPS:])


def _paces(state: CoordinatorState, work: WorkEstimate) -> Paces:
    plan = state.current_plan
    owners = [[plan.at(Cell(d, s)).owner for s in range(len(plan.stages))] for d in range(len(plan.pipelines))]
    return tuple(tuple(work.slowness[w] if w in work.compared else None for w in row) for row in owners)


# whether another one is better


def _proposal(state: CoordinatorState, slow: Sequence[str]) -> Trial | None:
    """The best split for these workers; None if it is not worth its pause, or if there is no memory for it."""
    plan, work, known = state.plan, state.stragglers.estimate, state.balance
    if plan is None or work is None or not _can_move(state):
        return None
    before, paces = _recent_step(state), _paces(state, work)
    tried = comparable(known.tried, plan.stages, paces, before)
    found = [(seconds, stages, True) for stages, seconds in tried.items()]
    estimated = None if known.unpaid else _estimated(state, work, before)
    if estimated and estimated[1] not in tried:
        found.append((*estimated, False))
    found = [one for one in found if before - one[0] >= WORTH * before and _has_memory(state, one[1])]
    if not found:
        return None
    after, stages, measured = min(found)
    if not pays(state, before - after):
        return None
    how = "split as they were before" if measured else "split anew"
    why = "; ".join(slow) or "layers take other times than their counted costs say"
    why = "that was faster" if measured and known.unpaid else why
    told = f"the layers are {how}, so that a step takes {after:.3g} s instead of {before:.3g} s or so: {why}"
    return Trial(stages=stages, paces=paces, before=before, promised=after, why=told, known=measured)


def _can_move(state: CoordinatorState) -> bool:
    """May layers move at all, is everybody in a place of its own, and has everybody said what it takes?"""
    plan = state.current_plan
    live = state.live(plan)
    places, layers = len(plan.stages) * state.spec.worker.devices, plan.stages[-1][1]
    fixed = state.spec.topology.split is not None or len(plan.stages) == 1 or places == layers
    if fixed or not state.progress.step_seconds or not keeps_its_seats(plan, live, live, grid_of(plan)):
        return False
    return len(owned_times(state)) == len(plan.cells())


def _estimated(state: CoordinatorState, work: WorkEstimate, before: float) -> tuple[float, Ranges] | None:
    """Seconds of a step with the split that is the best one by what layers take, and that split.

    None if no split can be better by enough.
    """
    plan = state.current_plan
    shares = [len(part) for part in plan.target.split]
    now = _computing(state, work, plan.stages)
    weights = [
        max(shares[d] * _slowness(state, work, d, s) for d in range(len(shares))) for s in range(len(plan.stages))
    ]
    devices = state.spec.worker.devices
    ideal = sum(work.costs) / sum(devices / weight for weight in weights)  # no split can have a shorter longest stage
    if now - ideal < WORTH * before:
        return None
    stages = balanced(plan, state.spec, work)
    return before - (now - _computing(state, work, stages)), stages


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
    """Is the pause of a measure worth it, if steps are shorter by so many seconds?"""
    return gain * _horizon(state) >= PAYS * _pause(state)


def _horizon(state: CoordinatorState) -> int:
    """Steps for which a split is of use: as many as the last measure was, or the rest of the job."""
    known, left = state.balance, state.spec.training.steps - state.step
    return left if known.backoff.acted_at is None or known.unpaid else min(left, state.step - known.acted_step)


def _pause(state: CoordinatorState) -> float:
    """Seconds for which a split stops the job: as long as the last one did, else by what memory workers take."""
    if state.balance.pause is not None:
        return state.balance.pause
    held = [record.memory.peak for record in state.workers.values() if record.memory]
    return (state.usual_step or 0.0) + max(held, default=0) / BYTES_PER_SECOND
