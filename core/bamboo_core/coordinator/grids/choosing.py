"""Choosing the grid: measured step times, the fastest grid for a number of workers, and whether a change pays. Pure.

A layer's time is the median of its newest measurements. For a grid with a measured step time, that time replaces the
model's, but counts less once newer ones are measured on other grids. The link speed is estimated so that the model
predicts the measured step. See docs/design/grids.md.
"""

from collections.abc import Callable
from functools import lru_cache
from statistics import median
from typing import Final

import msgspec

from bamboo_core.coordinator.grids import noise
from bamboo_core.coordinator.records.grids import StepTime
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.job.spec import JobSpec, RedundancyMode, RedundancySpec, heeds_memory, stabilization_seconds
from bamboo_core.planning.cell_portions import groups_of, without_portions
from bamboo_core.planning.plan import Plan
from bamboo_core.planning.profile import Layer, LayerBytes, ModelFigures, Network
from bamboo_core.planning.ring import are_apart
from bamboo_core.planning.splits.resplit_plans import Grid, grid_of
from bamboo_core.planning.splits.speeds import Ranges, forward_share
from bamboo_core.planning.steps.grid_rates import ALIKE, GridRate, GridRates, may_do_without

SECONDS_PER_OPERATION: Final = 1e-13  # of a device, until layers are measured
FORWARD_SHARE: Final = 1 / 3  # share of the forward pass in a layer's time, until that is measured
ASSUMED: Final = Network(flow=6.25e8, machine=1.25e9, latency=1e-3)  # 10 Gb/s, half of it for one connection
NETWORK_FACTORS: Final = tuple(2.0**n for n in range(-8, 7))  # candidate factors between real and assumed link speeds
UNKNOWN_BYTES: Final = LayerBytes(parameters=0, optimizer=0, gradients=0, activations=0, boundary=0)
FAMILIAR_STEPS: Final = 5  # on a grid, without the first ones, before its step time counts as known,
FAMILIAR_SECONDS: Final = 60.0  # or two steps that take this long together
WORTH: Final = 0.02  # share by which a step must be shorter on another grid, in addition to the uncertainty
LEAST_OUTLOOK, USUAL_OUTLOOK, MOST_OUTLOOK = 60.0, 600.0, 3600.0  # seconds until the workers change again
USUAL_REFILL: Final = 60.0  # seconds until a lost worker is replaced, before any was
GATHERING: Final = 5.0  # seconds: shortest wait for more workers, which often come together
SOON: Final = 30.0  # seconds: longest usual refill for which a restore waits
LEAST_PAUSE: Final = 1.0  # seconds of a new split, in addition to the transfer of layers


def rates_of(state: CoordinatorState, network: float | None = None) -> GridRates | None:
    """Return the estimates of step times by grid, or None while the layers' costs are unknown.

    network: factor between real and assumed link speeds; None: the current estimate.
    """
    figures = _figures(state, state.grids.network if network is None else network)
    if figures is None:
        return None
    known = state.grids.rates
    memory = state.layers.memory
    same = known is not None and known.spec == state.spec and known.memory == memory
    if known is not None and same and known.are_of(figures):
        return known
    return GridRates(figures, state.spec, memory)


def lacks_room(state: CoordinatorState, plan: Plan) -> bool:
    """Return whether the plan's grid gets fewer replicas than requested, because workers lack memory for them."""
    wanted = state.spec.redundancy.on(plan.target.pipelines, apart=are_owners_apart(state, plan)).kept
    return state.layers.costs is not None and redundancy(state, plan).kept < wanted


def redundancy(state: CoordinatorState, plan: Plan) -> RedundancySpec:
    """Return the redundancy that the plan's grid should have: the replicas of `spec_on`, and Auto resolved."""
    asked = spec_on(state, grid_of(plan), plan.stages).redundancy
    return asked.on(plan.target.pipelines, apart=are_owners_apart(state, plan))


def are_owners_apart(state: CoordinatorState, plan: Plan) -> bool:
    """Return whether each stage's owners are on enough workers, nodes and zones to replace replicas (`are_apart`).

    True if the redundancy on the plan's grid does not depend on that.
    """
    asked = state.spec.redundancy
    if asked.on(plan.target.pipelines) == asked.on(plan.target.pipelines, apart=False):
        return True
    return are_apart(plan.owner_spread, asked.replicas)


def spec_on(state: CoordinatorState, grid: Grid, split: Ranges | None = None) -> JobSpec:
    """Return the job's spec with the number of replicas that the job should keep on this grid (see `_copies`).

    If that number is 0, the spec's redundancy mode is None. split: layers of each stage; None: not chosen yet.
    """
    asked, copies = state.spec.redundancy, _copies(state, grid, split)
    if copies == asked.kept:
        return state.spec
    less = replace(asked, replicas=copies) if copies else replace(asked, mode=RedundancyMode.NONE)
    return replace(state.spec, redundancy=less)


def _copies(state: CoordinatorState, grid: Grid, split: Ranges | None) -> int:
    """Return the number of replicas of each stage: as requested, but in elastic or Auto jobs only as many as fit.

    If not even one fits, a job that may not do without replicas keeps the requested number. Until a restarted
    coordinator knows the layers, a job without replicas stays without. split: layers of each stage; None: unknown, so
    the result is all requested replicas or none.
    """
    asked = state.spec.redundancy.kept
    if not asked or not heeds_memory(state.spec):
        return asked
    bare = state.plan is not None and state.plan.mode is RedundancyMode.NONE
    if state.layers.costs is None:
        return 0 if bare else asked
    rates = rates_of(state)
    if rates is None:
        return asked
    if split is None:
        return 0 if rates.lacks_room(grid) else asked
    without = bare or may_do_without(state.spec) or rates.siblings_suffice(grid)
    return rates.copies(grid, split) or (0 if without else asked)


def keeps_split(state: CoordinatorState, rates: GridRates, grid: Grid) -> bool:
    """Return whether the job can change to this grid without splitting layers anew.

    It can if the number of stages stays the same and workers have room for the stages with at least the present
    replicas.
    """
    plan = state.current_plan
    if grid.stages != len(plan.stages):
        return False
    present = _copies(state, grid_of(plan), plan.stages)
    return rates.as_run(grid).has_room(grid, plan.stages) and rates.copies(grid, plan.stages) >= present


def is_measured(state: CoordinatorState) -> bool:
    """Return whether the times of layers were measured."""
    return bool(state.grids.costs)


def _figures(state: CoordinatorState, network: float) -> ModelFigures | None:
    costs = state.grids.costs or tuple(cost * SECONDS_PER_OPERATION for cost in state.layers.costs or ())
    if not costs:
        return None
    sizes = state.layers.sizes if len(state.layers.sizes) == len(costs) else (UNKNOWN_BYTES,) * len(costs)
    share = forward_share(times for record in state.workers.values() for times in record.times)
    return _figures_of(tuple(costs), tuple(sizes), FORWARD_SHARE if share is None else share, network)


@lru_cache(maxsize=64)
def _figures_of(costs: tuple[float, ...], sizes: tuple[LayerBytes, ...], share: float, factor: float) -> ModelFigures:
    """Build the model's figures. Cached, because every event may need them and the arguments seldom change."""
    layers = tuple(
        Layer(
            forward=max(0.0, seconds) * share,
            backward=max(0.0, seconds) * (1 - share),
            **msgspec.structs.asdict(size),
        )
        for seconds, size in zip(costs, sizes, strict=True)
    )
    network = Network(flow=ASSUMED.flow * factor, machine=ASSUMED.machine * factor, latency=ASSUMED.latency)
    return ModelFigures(layers=layers, network=network)


def is_undisturbed(state: CoordinatorState) -> bool:
    """Return whether steps run at the plan's normal speed: a staying owner per cell, one layout, no moving layers."""
    plan = state.plan
    if plan is None or state.phase != "Running" or len(plan.layouts) > 1 or plan.sources or is_short(state):
        return False
    return state.progress.generation == plan.target.generation


def measured(state: CoordinatorState) -> float | None:
    """Return the median seconds of a step on the plan's grid; None if too few are timed or steps are disturbed now."""
    taken = state.grids.taken
    known = len(taken) >= FAMILIAR_STEPS or (len(taken) > 1 and sum(taken) >= FAMILIAR_SECONDS)
    return median(taken) if known and is_undisturbed(state) else None


def is_short(state: CoordinatorState) -> bool:
    """Return whether a worker runs several cells, or an owner is lost or under notice."""
    plan = state.current_plan
    absent = state.lost(plan).union(state.noticed)
    return plan.is_doubled or not absent.isdisjoint(plan.target_owners)


def calibrated(state: CoordinatorState, rates: GridRates) -> float:
    """Return the factor between real and assumed link speeds for which the model best predicts the measured step.

    It is the present factor if the step or the layers are not measured, or if the model is exact enough already.
    """
    seconds, plan = measured(state), state.plan
    if seconds is None or plan is None or not is_measured(state):
        return state.grids.network
    if abs(rates.seconds_of(plan, plan.target) / seconds - 1) <= ALIKE + noise.doubt(state.grids.taken):
        return state.grids.network

    def modelled(factor: float) -> float:
        network = Network(flow=ASSUMED.flow * factor, machine=ASSUMED.machine * factor, latency=ASSUMED.latency)
        figures = ModelFigures(layers=rates.figures.layers, network=network)
        return GridRates(figures, state.spec).seconds_of(plan, plan.target)

    return _nearest(modelled, seconds)


def _nearest(modelled: Callable[[float], float], seconds: float) -> float:
    """Return the candidate factor whose step time is closest to `seconds`; of about equal ones, that nearest to 1."""
    slower, faster = (tuple(f for f in NETWORK_FACTORS if f < 1), tuple(f for f in NETWORK_FACTORS if f > 1))
    tried = {1.0: modelled(1.0)}
    too_slow = tried[1.0] > seconds
    for factor in faster if too_slow else reversed(slower):
        tried[factor] = modelled(factor)
        if (tried[factor] > seconds) != too_slow:
            break
    return min(tried, key=lambda factor: (round(abs(tried[factor] / seconds - 1), 2), abs(factor - 1)))


def best(state: CoordinatorState, rates: GridRates, workers: int) -> GridRate | None:
    """Return the fastest grid that a number of workers can run, or None if they can run none.

    Measured step times (`known_steps`) take the place of modelled ones, which are multiplied by `scale`.
    """
    fastest = ranked(state, rates, workers, 1)
    return fastest[0] if fastest else None


def ranked(state: CoordinatorState, rates: GridRates, workers: int, most: int) -> tuple[GridRate, ...]:
    """Return the fastest grid of each number of stages for a number of workers, fastest first, at most `most` grids."""
    return rates.ranked(workers, most, known_steps(state, rates), scale(state, rates))


def rate(state: CoordinatorState, rates: GridRates, grid: Grid) -> GridRate | None:
    """Return a grid with its step time, measured or scaled as in `best`; None if it does not fit in workers' memory."""
    return rates.rate(grid, known_steps(state, rates), scale(state, rates))


def scale(state: CoordinatorState, rates: GridRates) -> float:
    """Return the ratio of measured to modelled step time on the grid that was measured last; 1 if there is none."""
    if not state.grids.measured:
        return 1.0
    grid, newest = max(state.grids.measured.items(), key=lambda one: one[1].at)
    return _seconds_now(newest, rates) / rates.seconds(grid)


def known_steps(state: CoordinatorState, rates: GridRates) -> dict[Grid, float]:
    """Return the step time in seconds of each measured grid, adjusted to the present times of layers.

    The older a measurement is than the newest one, the more the model's time, multiplied by `scale`, replaces it.
    """
    known = state.grids.measured
    newest = max((one.at for one in known.values()), default=0.0)
    by_grid = {}
    for grid, one in known.items():
        seconds, weight = _seconds_now(one, rates), noise.weight(newest - one.at)
        if weight < 1:
            modelled = scale(state, rates) * rates.seconds(grid)
            seconds = modelled * (seconds / modelled) ** weight
        by_grid[grid] = seconds
    return by_grid


def _seconds_now(one: StepTime, rates: GridRates) -> float:
    return one.seconds * (rates.work / one.work)


def now_expected(state: CoordinatorState, rates: GridRates) -> float:
    """Return the expected seconds of a step under the newest plan, even if workers run several cells.

    Portions, which let several workers run a lost worker's cell, are left out: this favours a complete grid, in which
    no worker has to hold the states of two stages.
    """
    plan = state.current_plan
    if not is_short(state) and (seconds := known_steps(state, rates).get(grid_of(plan))):
        return seconds
    return scale(state, rates) * rates.seconds_of(without_portions(plan), plan.target)


def left(state: CoordinatorState, rates: GridRates, now: float) -> float:
    """Return the expected seconds until the step in progress ends under the newest plan; negative if it is overdue.

    If a worker is missing or leaving (`is_short`) and the grid fits, that is the time to run the unfinished share and
    repeat about one gradient group, less the time since the loss. Else it is a step's time less the time passed.
    """
    plan, since, known = state.current_plan, state.progress.last_at, rate(state, rates, grid_of(state.current_plan))
    if not is_short(state) or known is None:
        return now_expected(state, rates) - (now - since)
    whole = scale(state, rates) * rates.seconds_of(plan, plan.target)
    step, lost = state.grids.short
    lost = max(lost, since) if step == state.step else now
    done = (lost - since) / known.seconds - 1 / groups_of(plan.layouts, 0)
    return (1 - max(0.0, done)) * whole - (now - lost)


def outlook(state: CoordinatorState, now: float) -> float:
    """Estimate the seconds for which the number of workers will stay the same, from the times of its last changes."""
    changes = state.grids.changes
    if len(changes) < 2:
        return USUAL_OUTLOOK
    return min(MOST_OUTLOOK, max(LEAST_OUTLOOK, (now - changes[0]) / len(changes)))


def pause(state: CoordinatorState, rates: GridRates, grid: Grid) -> float:
    """Estimate the seconds for which a change to `grid` stops training; 0 if it can keep the split of the layers."""
    if keeps_split(state, rates, grid):
        return 0.0
    whole = sum(layer.parameters + layer.optimizer for layer in rates.figures.layers)
    held = whole / grid.stages * (1 + state.spec.redundancy.on(grid.pipelines).kept)
    moving = LEAST_PAUSE + held / rates.figures.network.flow
    return moving if state.splits.pause is None else (moving + state.splits.pause) / 2


def pays(now_seconds: float, then_seconds: float, stopped: float, until: float, margin: float = WORTH) -> bool:
    """Return whether a change of the grid, with a pause of `stopped` seconds, completes more steps in `until` seconds.

    now_seconds, then_seconds: the time of a step before and after the change. margin: a step must also be shorter by
    more than this share. Callers pass 0 if a worker is missing (`is_short`), since a complete grid is worth more.
    """
    if then_seconds >= (1 - margin) * now_seconds:
        return False
    return (until - stopped) / then_seconds > until / now_seconds


def wait(state: CoordinatorState, then: GridRate, now_seconds: float, stopped: float, now: float) -> float:
    """Return the seconds for which another grid must have been better before the job changes to it.

    With a complete grid, that is the time in which the change earns back its pause, since more workers may come soon:
    at least GATHERING, at most `elastic.stabilizationSeconds`. With a worker missing (`is_short`), the job waits only
    for the successor of a lost worker, if one is expected before a change would earn back its pause; else 0.
    """
    brought_in = stopped * now_seconds / max(1e-9, now_seconds - then.seconds)
    if not is_short(state):
        return min(stabilization_seconds(state.spec), max(GATHERING, brought_in))
    gaps = state.grids.gaps
    left = _usual_refill(state) - (now - gaps[-1]) if gaps else 0.0
    return max(0.0, left) if left < brought_in else 0.0


def restart_wait(state: CoordinatorState) -> float:
    """Return the seconds for which a restore waits for more workers, at most `elastic.stabilizationSeconds`.

    That is the usual time to replace a worker, but at least GATHERING, and only GATHERING if it is longer than SOON.
    """
    usual = _usual_refill(state)
    return min(stabilization_seconds(state.spec), usual if GATHERING < usual <= SOON else GATHERING)


def _usual_refill(state: CoordinatorState) -> float:
    """Return the median seconds until a lost worker was replaced; USUAL_REFILL if none was."""
    refills = state.grids.refills
    return median(refills) if refills else USUAL_REFILL
