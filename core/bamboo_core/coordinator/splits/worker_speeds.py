"""Speeds of workers and times of layers, from the workers' own measurements. Pure functions of the state."""

from collections.abc import Collection, Mapping
from statistics import median, median_low
from typing import Final

from bamboo_core.coordinator.records.grids import OwnPace
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.planning.plan import Cell, Plan, WorkerId
from bamboo_core.planning.splits.speeds import LEAST_MICROBATCHES, Layers, Measurement, Speeds, StageTimes, WorkEstimate

OWN_LOOKS: Final = 5  # measurements of a worker that define its usual time
EARLIER: Final = " earlier"  # suffix for the name of a worker's earlier self


def owned_times(state: CoordinatorState) -> dict[Cell, StageTimes]:
    """Return the owners' times for the cells whose present layers they have timed for LEAST_MICROBATCHES or more."""
    plan = state.current_plan
    by_cell = {}
    for cell in plan.cells():
        record = state.workers.get(plan.at(cell).owner)
        times = _of(record.times if record else (), plan.stages[cell.stage])
        if times and times.microbatches >= LEAST_MICROBATCHES and min(times.forward, times.backward) > 0:
            by_cell[cell] = times
    return by_cell


def seconds_of(times: StageTimes) -> float:
    """Return the seconds of a microbatch: forward plus backward."""
    return times.forward + times.backward


def measurements(state: CoordinatorState) -> list[Measurement]:
    """Return the measurements of owners, and of other workers (replicas) that have timed forwards of a stage.

    A replica's forwards of all layers together are compared with an owner's; its backward counts as slower or faster by
    the same factor.
    """
    plan, owned = state.current_plan, owned_times(state)
    measured = [Measurement(plan.at(c).owner, plan.stages[c.stage], seconds_of(t)) for c, t in owned.items()]
    known = {(m.worker, m.layers) for m in measured}
    for stage, layers in enumerate(plan.stages):
        owner = next((t for c, t in owned.items() if c.stage == stage and sum(t.each) > 0), None)
        for worker, record in state.workers.items() if owner else ():
            times = _of(record.times, layers)
            if owner and times and sum(times.each) > 0 and (worker, layers) not in known:
                measured.append(Measurement(worker, layers, seconds_of(owner) * sum(times.each) / sum(owner.each)))
    return measured


def of_replaced(state: CoordinatorState) -> list[Measurement]:
    """Return the measurements of workers replaced as stragglers, for the layers of present stages."""
    plan, replaced = state.current_plan, state.stragglers.replaced.items()
    return [Measurement(worker, layers, seconds) for (worker, layers), seconds in replaced if layers in plan.stages]


def own_paces(state: CoordinatorState) -> dict[tuple[WorkerId, Layers], OwnPace]:
    """Return each owner's times for its layers, with the newest one added. Times of other layers are dropped.

    A slow worker without a usual time gets none: compared with its own slow times, it would seem to have recovered.
    """
    plan, known, paces = state.current_plan, state.stragglers.paces, {}
    for cell, times in owned_times(state).items():
        key = plan.at(cell).owner, plan.stages[cell.stage]
        before = known.get(key, OwnPace())
        newest = (*before.newest, seconds_of(times))[-OWN_LOOKS:]
        usual = [before.usual] if before.usual is not None else []
        if len(newest) == OWN_LOOKS and (before.usual is not None or key[0] not in state.stragglers.slow):
            usual.append(median(newest))
        paces[key] = OwnPace(newest=newest, usual=min(usual, default=None))
    return paces


def of_earlier(paces: Mapping[tuple[WorkerId, Layers], OwnPace], alone: Collection[WorkerId]) -> list[Measurement]:
    """Return earlier times of workers whose layers no other worker runs, so that each is compared with itself.

    A change that affects all workers, such as longer samples, is no worker's fault: earlier times are scaled by the
    lower median of the owners' slowdowns. Empty with fewer than two usual times: the cause may then be the layers.
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


def estimate(state: CoordinatorState, measured: Speeds) -> WorkEstimate | None:
    """Return each layer's time on a worker of usual speed, and workers' slowness; None until all stages are timed.

    The first and last stage keep the time they spend on data, whatever layers they have. Within a stage, layers share
    its seconds like their forwards or, if forwards are not timed one by one, like their counted costs. Backwards are
    not timed by layer; each takes a nearly constant multiple of the forward.
    """
    plan, owned = state.current_plan, owned_times(state)
    costs: list[float] = []
    reading: list[float] = []
    for stage, layers in enumerate(plan.stages):
        shares = _shares(plan, owned, stage, state.layers.costs)
        if layers not in measured.seconds or shares is None:
            return None
        is_end = stage in (0, len(plan.stages) - 1)
        reading.append(_reading(owned, stage) * measured.seconds[layers] if is_end else 0.0)
        costs += (share * (measured.seconds[layers] - reading[-1]) for share in shares)
    ends = (reading[0], reading[-1] if len(reading) > 1 else 0.0)
    return WorkEstimate(tuple(costs), dict(measured.slowness), ends)


def _reading(owned: Mapping[Cell, StageTimes], stage: int) -> float:
    """Return the share, 0 to 1, of the first or last stage's time per microbatch that it spends on data.

    That time is the part of a forward outside the layers; the share is 0 if layers are not timed one by one.
    """
    known = [t for c, t in owned.items() if c.stage == stage and t.each]
    parts = [max(0.0, t.forward - sum(t.each)) / seconds_of(t) for t in known]
    return median(parts) if parts else 0.0


def _shares(
    plan: Plan, owned: Mapping[Cell, StageTimes], stage: int, counted: tuple[float, ...] | None
) -> list[float] | None:
    """Return each layer's share of its stage's time, in total 1; None if neither times nor counted costs are known."""
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
    """Return each owner's time per counted cost of its layers, relative to the other owners' median.

    Meant for workers without another comparison. Empty without counted costs, or if fewer than LEAST_WORKERS are timed.
    """
    plan, costs = state.current_plan, state.layers.costs
    if costs is None or len(costs) != plan.stages[-1][1]:
        return {}
    paces = {}
    for cell, times in owned_times(state).items():
        counted = sum(costs[slice(*plan.stages[cell.stage])])
        if counted > 0:
            paces[plan.at(cell).owner] = seconds_of(times) / counted
    if len(paces) < LEAST_WORKERS:
        return {}
    return {w: pace / median(other for o, other in paces.items() if o != w) for w, pace in paces.items()}


LEAST_WORKERS: Final = 3  # to compare by counted costs; with two, either may be the unusual one


def _of(times: tuple[StageTimes, ...], layers: tuple[int, int]) -> StageTimes | None:
    return next((t for t in times if t.layers == layers and len(t.each) in (0, layers[1] - layers[0])), None)
