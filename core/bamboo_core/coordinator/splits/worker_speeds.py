"""What the workers' own measurements say of their speeds, and of the layers. Pure functions of the state."""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from statistics import median, median_low
from typing import Final

from bamboo_core.coordinator.splits.record import OwnPace
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.planning.plan import Cell, Plan, WorkerId
from bamboo_core.planning.splits.speeds import Layers, Measurement, Speeds, WorkEstimate
from bamboo_core.planning.splits.stage_times import LEAST_MICROBATCHES, StageTimes

OWN_LOOKS: Final = 5  # figures of a worker, from as many looks, that say what is usual for it
EARLIER: Final = " earlier"  # after a worker's name: as it was


def owned_times(state: CoordinatorState) -> dict[Cell, StageTimes]:
    """The times of each cell whose owner has measured them with the cell's layers as they are now."""
    plan = state.current_plan
    found = {}
    for cell in plan.cells():
        record = state.workers.get(plan.at(cell).owner)
        times = _of(record.times if record else (), plan.stages[cell.stage])
        if times and times.microbatches >= LEAST_MICROBATCHES and min(times.forward, times.backward) > 0:
            found[cell] = times
    return found


def seconds_of(times: StageTimes) -> float:
    """For a microbatch, there and back."""
    return times.forward + times.backward


def measurements(state: CoordinatorState) -> list[Measurement]:
    """The measurements of owners, and of those who have timed forwards of a stage whose replica they hold.
    Such a forward is compared with the owner's, both layer by layer, and counts as if the backward were slower or
    faster by the same factor.
    """
    plan, owned = state.current_plan, owned_times(state)
    found = [Measurement(plan.at(c).owner, plan.stages[c.stage], seconds_of(t)) for c, t in owned.items()]
    known = {(m.worker, m.layers) for m in found}
    for stage, layers in enumerate(plan.stages):
        owner = next((t for c, t in owned.items() if c.stage == stage and sum(t.each) > 0), None)
        for worker, record in state.workers.items() if owner else ():
            times = _of(record.times, layers)
            if owner and times and sum(times.each) > 0 and (worker, layers) not in known:
                found.append(Measurement(worker, layers, seconds_of(owner) * sum(times.each) / sum(owner.each)))
    return found


def of_replaced(state: CoordinatorState) -> list[Measurement]:
    """The measurements of workers that were replaced and had run the layers of a stage as it is now."""
    plan, replaced = state.current_plan, state.stragglers.replaced.items()
    return [Measurement(worker, layers, seconds) for (worker, layers), seconds in replaced if layers in plan.stages]


def own_paces(state: CoordinatorState) -> dict[tuple[WorkerId, Layers], OwnPace]:
    """What owners take for their layers, with this look's figures. What was known of other layers is dropped.

    What is usual for a worker is not learned while it is slow: it would seem to have recovered.
    """
    plan, known, found = state.current_plan, state.stragglers.paces, {}
    for cell, times in owned_times(state).items():
        key = plan.at(cell).owner, plan.stages[cell.stage]
        before = known.get(key, OwnPace())
        newest = (*before.newest, seconds_of(times))[-OWN_LOOKS:]
        usual = [before.usual] if before.usual is not None else []
        if len(newest) == OWN_LOOKS and (before.usual is not None or key[0] not in state.stragglers.slow):
            usual.append(median(newest))
        found[key] = OwnPace(newest=newest, usual=min(usual, default=None))
    return found


def of_earlier(paces: Mapping[tuple[WorkerId, Layers], OwnPace], alone: Collection[WorkerId]) -> list[Measurement]:
    """What those workers took before, who run layers that nobody else runs: each is compared with itself.

    What changes for all, such as longer samples, is no worker's doing: the past is scaled by the middle one of the
    factors by which owners take longer now, of two the smaller one. Empty with one worker, of which nobody can say
    whether it or its layers have changed.
    """
    factors = [pace.newest[-1] / pace.usual for pace in paces.values() if pace.usual]
    if len(factors) < 2:
        return []
    common = median_low(factors)
    return [
        Measurement(worker + EARLIER, layers, pace.usual * common)
        for (worker, layers), pace in paces.items()
        if pace.usual and worker in alone
    ]


def estimate(state: CoordinatorState, found: Speeds) -> WorkEstimate | None:
    """What each layer takes a worker of usual speed, and how slow each worker is; None if a stage is not measured yet.

    What the first stage and the last one take for their data stays with them, wherever layers are. Within a stage the
    layers share its seconds as their forwards do, or, where these are not known one by one, as their counted costs say.
    A backward cannot be told apart by layers; it takes a nearly constant multiple of the forward.
    """
    plan, owned = state.current_plan, owned_times(state)
    costs: list[float] = []
    reading: list[float] = []
    for stage, layers in enumerate(plan.stages):
        shares = _shares(plan, owned, stage, state.profile.costs)
        if layers not in found.seconds or shares is None:
            return None
        is_end = stage in (0, len(plan.stages) - 1)
        reading.append(_reading(owned, stage) * found.seconds[layers] if is_end else 0.0)
        costs += (share * (found.seconds[layers] - reading[-1]) for share in shares)
    ends = (reading[0], reading[-1] if len(reading) > 1 else 0.0)
    return WorkEstimate(tuple(costs), dict(found.slowness), ends)


def _reading(owned: Mapping[Cell, StageTimes], stage: int) -> float:
    """The part, from 0 to 1, of what the first or last stage takes for a microbatch that goes to its data.
    It is in a whole forward, and in none of its layers. 0 if layers are not known one by one.
    """
    known = [t for c, t in owned.items() if c.stage == stage and t.each]
    parts = [max(0.0, t.forward - sum(t.each)) / seconds_of(t) for t in known]
    return median(parts) if parts else 0.0


def _shares(
    plan: Plan, owned: Mapping[Cell, StageTimes], stage: int, counted: tuple[float, ...] | None
) -> list[float] | None:
    """The share of each of a stage's layers in what the stage takes; they add up to 1. None if nothing tells them."""
    first, end = plan.stages[stage]
    rows = [t.each for c, t in owned.items() if c.stage == stage and len(t.each) == end - first and sum(t.each) > 0]
    if rows:
        parts = [median(row[i] / sum(row) for row in rows) for i in range(end - first)]
    elif counted is not None and len(counted) == plan.stages[-1][1]:
        parts = list(counted[first:end])
    else:
        return None
    whole = sum(parts)
    return [part / whole for part in parts] if whole > 0 else [1 / len(parts)] * len(parts)


def by_counted_costs(state: CoordinatorState) -> dict[WorkerId, float]:
    """By which factor each owner takes longer for its layers' counted cost than the median of the others.

    For those who cannot be compared otherwise. Empty if too few are measured to say what is usual.
    """
    plan, costs = state.current_plan, state.profile.costs
    if costs is None or len(costs) != plan.stages[-1][1]:
        return {}
    paces = {}
    for cell, times in owned_times(state).items():
        counted = sum(costs[slice(*plan.stages[cell.stage])])
        if counted > 0:
            paces[plan.at(cell).owner] = seconds_of(times) / counted
    if len(paces) < LEAST_WORKERS:
        return {}
    ordered = sorted(paces.values())
    return {w: pace / _median_of_others(ordered, pace) for w, pace in paces.items()}


def _median_of_others(ordered: Sequence[float], one: float) -> float:
    """The median of these numbers, which ascend, without one of them."""
    left_out, others = bisect_left(ordered, one), len(ordered) - 1

    def other(index: int) -> float:
        return ordered[index + (index >= left_out)]

    upper = other(others // 2)
    return upper if others % 2 else (other(others // 2 - 1) + upper) / 2


LEAST_WORKERS: Final = 3  # to compare by counted costs: of two nobody can say which is the unusual one


def _of(times: tuple[StageTimes, ...], layers: tuple[int, int]) -> StageTimes | None:
    return next((t for t in times if t.layers == layers and len(t.each) in (0, layers[1] - layers[0])), None)
