"""Choosing the grid: what is known of the job's steps, which grid is the fastest for some workers, and whether it pays
to change to it. Pure functions of the state.

Layers count by what they were measured to take, the median of the newest looks. What a step took on a grid that was
run counts before what the model of a step says of it, the less the older it is, and tells how good links are: a step
that is longer than its computing explains makes them slower. See docs/design/grids.md.
"""

from collections.abc import Callable
from functools import lru_cache
from statistics import median
from typing import Final

import msgspec

from bamboo_core.coordinator.grids import noise
from bamboo_core.coordinator.grids.record import StepTime
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.job.spec import JobSpec, RedundancyMode, RedundancySpec, stabilization_seconds
from bamboo_core.planning.plan import Plan
from bamboo_core.planning.portions import groups_of, without_portions
from bamboo_core.planning.profile import Layer, ModelFigures, Network
from bamboo_core.planning.ring import are_apart
from bamboo_core.planning.splits.resplit import Grid, grid_of
from bamboo_core.planning.splits.uneven_split import Ranges
from bamboo_core.planning.steps.grid_rates import ALIKE, GridRate, GridRates, may_do_without
from bamboo_core.planning.steps.layer_bytes import LayerBytes

SECONDS_PER_OPERATION: Final = 1e-13  # a device's, until layers are measured
FORWARD_SHARE: Final = 1 / 3  # of what a layer takes there and back, until that is measured
ASSUMED: Final = Network(flow=6.25e8, machine=1.25e9, latency=1e-3)  # 10 Gb/s, half of it for one connection
NETWORK_FACTORS: Final = tuple(2.0**n for n in range(-8, 7))  # by which links are found to be faster or slower
UNKNOWN_BYTES: Final = LayerBytes(parameters=0, optimizer=0, gradients=0, activations=0, boundary=0)
FAMILIAR_STEPS: Final = 5  # on a grid, without the first ones, before what its steps take is known,
FAMILIAR_SECONDS: Final = 60.0  # or two that take as long together
WORTH: Final = 0.02  # of a step: by which it must be shorter on another grid, beside what is uncertain
LEAST_OUTLOOK, USUAL_OUTLOOK, MOST_OUTLOOK = 60.0, 600.0, 3600.0  # seconds until the workers change again
USUAL_REFILL: Final = 60.0  # seconds until a worker comes for one that was lost, before any has
GATHERING: Final = 5.0  # seconds at least that are waited for more workers, which often come together
SOON: Final = 30.0  # seconds, in which a worker that comes is waited for before a job begins again
LEAST_PAUSE: Final = 1.0  # seconds of splitting layers anew, beside what moves


def rates_of(state: CoordinatorState, network: float | None = None) -> GridRates | None:
    """What steps take on grids, as far as is known now; None if nothing is known of the layers. network: by which
    factor links are faster than is assumed; None: as they have seemed until now.
    """
    figures = _figures(state, state.grids.network if network is None else network)
    if figures is None:
        return None
    known = state.grids.rates
    memory = state.profile.memory
    same = known is not None and known.spec == state.spec and known.memory == memory
    if known is not None and same and known.are_of(figures):
        return known
    return GridRates(figures, state.spec, memory)


def lacks_room(state: CoordinatorState, plan: Plan) -> bool:
    """Are there to be fewer replicas of stages than are asked for, since workers are known to have no room for them?"""
    wanted = state.spec.redundancy.on(plan.target.pipelines, apart=are_owners_apart(state, plan)).kept
    return state.profile.costs is not None and redundancy(state, plan).kept < wanted


def redundancy(state: CoordinatorState, plan: Plan) -> RedundancySpec:
    """How stages are to be protected on the plan's grid with the workers that run it: with a mode that is not Auto."""
    asked = spec_on(state, grid_of(plan), plan.stages).redundancy
    return asked.on(plan.target.pipelines, apart=are_owners_apart(state, plan))


def are_owners_apart(state: CoordinatorState, plan: Plan) -> bool:
    """Are the owners of each stage apart enough to hold each other's copies, if that makes a difference?"""
    asked = state.spec.redundancy
    if asked.on(plan.target.pipelines) == asked.on(plan.target.pipelines, apart=False):
        return True
    return are_apart(plan.owner_spread, asked.replicas)


def spec_on(state: CoordinatorState, grid: Grid, split: Ranges | None = None) -> JobSpec:
    """The job's specification, with the redundancy for which there is room on that grid, and with these layers of each
    stage; None: with those that it would get, which heed memory.
    """
    asked, copies = state.spec.redundancy, _copies(state, grid, split)
    if copies == asked.kept:
        return state.spec
    less = replace(asked, replicas=copies) if copies else replace(asked, mode=RedundancyMode.NONE)
    return replace(state.spec, redundancy=less)


def _copies(state: CoordinatorState, grid: Grid, split: Ranges | None) -> int:
    """Replicas of each stage: those that are asked for, or as many as there is room for.

    As long as a restarted coordinator does not know how large layers are, a job without any goes on as it does. A job
    that has some and may not do without keeps them.
    """
    asked = state.spec.redundancy.kept
    if not asked or not (state.spec.elastic or state.spec.redundancy.mode is RedundancyMode.AUTO):
        return asked
    bare = state.plan is not None and state.plan.mode is RedundancyMode.NONE
    if state.profile.costs is None:
        return 0 if bare else asked
    rates = rates_of(state)
    if rates is None:
        return asked
    if split is None:
        return 0 if rates.lacks_room(grid) else asked
    without = bare or may_do_without(state.spec) or rates.siblings_suffice(grid)
    return rates.copies(grid, split) or (0 if without else asked)


def keeps_split(state: CoordinatorState, rates: GridRates, grid: Grid) -> bool:
    """May the job change to that grid with the layers split as they are? There are as many stages, and workers have
    room for them, with the copies that there are to be and with those that there are.
    """
    plan = state.current_plan
    if grid.stages != len(plan.stages):
        return False
    there = _copies(state, grid_of(plan), plan.stages)
    return rates.as_run(grid).has_room(grid, plan.stages) and rates.copies(grid, plan.stages) >= there


def is_familiar(state: CoordinatorState) -> bool:
    """Is it known what steps take on the grid that runs?"""
    return state.plan is not None and grid_of(state.plan) in state.grids.measured


def is_measured(state: CoordinatorState) -> bool:
    """Is it known what layers take?"""
    return bool(state.grids.costs)


def _figures(state: CoordinatorState, network: float) -> ModelFigures | None:
    costs = state.grids.costs or tuple(cost * SECONDS_PER_OPERATION for cost in state.profile.costs or ())
    if not costs:
        return None
    sizes = state.profile.layers if len(state.profile.layers) == len(costs) else (UNKNOWN_BYTES,) * len(costs)
    share = FORWARD_SHARE if state.forward_share is None else state.forward_share
    return _figures_of(tuple(costs), tuple(sizes), share, network)


@lru_cache(maxsize=64)
def _figures_of(costs: tuple[float, ...], sizes: tuple[LayerBytes, ...], share: float, factor: float) -> ModelFigures:
    """Asked for after every event, and seldom of other numbers."""
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
    """Do steps take what they do on the grid of the plan, with all workers, and nothing on its way?"""
    plan = state.plan
    if plan is None or state.phase != "Running" or len(plan.layouts) > 1 or plan.sources or is_short(state):
        return False
    return state.progress.generation == plan.target.generation


def measured(state: CoordinatorState) -> float | None:
    """Seconds of an undisturbed step on the grid of the plan, if it has been run for long enough."""
    taken = state.grids.taken
    known = len(taken) >= FAMILIAR_STEPS or (len(taken) > 1 and sum(taken) >= FAMILIAR_SECONDS)
    return median(taken) if known and is_undisturbed(state) else None


def is_short(state: CoordinatorState) -> bool:
    """Does a worker run several stages, or one for which it is about to leave?"""
    plan = state.current_plan
    absent = state.roster.lost(plan).union(state.noticed)
    return plan.is_doubled or not absent.isdisjoint(plan.target_owners)


def calibrated(state: CoordinatorState, rates: GridRates) -> float:
    """By which factor links are faster than assumed, so that the model gives the step that was measured."""
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
    """The factor with which the model comes closest, to a hundredth, of equals the one next to 1.

    Faster links make no step longer: so factors are tried from 1 on, in the direction that comes closer, up to the
    first one with which the model is on the other side.
    """
    slower, faster = (tuple(f for f in NETWORK_FACTORS if f < 1), tuple(f for f in NETWORK_FACTORS if f > 1))
    found = {1.0: modelled(1.0)}
    too_slow = found[1.0] > seconds
    for factor in faster if too_slow else reversed(slower):
        found[factor] = modelled(factor)
        if (found[factor] > seconds) != too_slow:
            break
    return min(found, key=lambda factor: (round(abs(found[factor] / seconds - 1), 2), abs(factor - 1)))


def best(state: CoordinatorState, rates: GridRates, workers: int) -> GridRate | None:
    """The grid that so many workers run fastest, as far as that is known; None if they can run none.

    What was measured on a grid counts instead of what the model says of it, and all others are taken to be as much
    slower than modelled as the grid that runs now.
    """
    found = ranked(state, rates, workers, 1)
    return found[0] if found else None


def ranked(state: CoordinatorState, rates: GridRates, workers: int, most: int) -> tuple[GridRate, ...]:
    """The best grid of each of so many numbers of stages, by the same seconds, the best first."""
    return rates.ranked(workers, most, known_steps(state, rates), scale(state, rates))


def rate(state: CoordinatorState, rates: GridRates, grid: Grid) -> GridRate | None:
    """What a step takes on that grid, by the same seconds; None if workers have no room for it."""
    return rates.rate(grid, known_steps(state, rates), scale(state, rates))


def scale(state: CoordinatorState, rates: GridRates) -> float:
    """By how much a step takes longer than modelled: as on the grid that was measured last."""
    if not state.grids.measured:
        return 1.0
    grid, newest = max(state.grids.measured.items(), key=lambda one: one[1].at)
    return _seconds_now(newest, rates) / rates.seconds(grid)


def known_steps(state: CoordinatorState, rates: GridRates) -> dict[Grid, float]:
    """Seconds of a step on the grids that were run: as measured, if layers took then what they take now, and the older
    the more as on the grid that was measured last.
    """
    known = state.grids.measured
    newest = max((one.at for one in known.values()), default=0.0)
    found = {}
    for grid, one in known.items():
        seconds, weight = _seconds_now(one, rates), noise.weight(newest - one.at)
        if weight < 1:
            modelled = scale(state, rates) * rates.seconds(grid)
            seconds = modelled * (seconds / modelled) ** weight
        found[grid] = seconds
    return found


def _seconds_now(one: StepTime, rates: GridRates) -> float:
    return one.seconds * (rates.work / one.work)


def now_expected(state: CoordinatorState, rates: GridRates) -> float:
    """Seconds of a step under the plan in force, with workers that run several stages as they do.

    What pipelines of several stages share does not count: a worker that took a stage over holds two stages' states, and
    a grid without holes is worth more than its steps say.
    """
    plan = state.current_plan
    if not is_short(state) and (seconds := known_steps(state, rates).get(grid_of(plan))):
        return seconds
    return scale(state, rates) * rates.seconds_of(without_portions(plan), plan.target)


def left(state: CoordinatorState, rates: GridRates, now: float) -> float:
    """Seconds until the step in progress is done under the plan in force: the share that is not done, of what the whole
    step would take with the workers that are left. About a group of microbatches is run again.
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
    """Seconds for which the workers are expected to stay as many as they are: as the newest changes were apart."""
    changes = state.grids.changes
    if len(changes) < 2:
        return USUAL_OUTLOOK
    return min(MOST_OUTLOOK, max(LEAST_OUTLOOK, (now - changes[0]) / len(changes)))


def pause(state: CoordinatorState, rates: GridRates, grid: Grid) -> float:
    """Seconds in which no step begins if the grid changes: none if the layers stay split as they are."""
    if keeps_split(state, rates, grid):
        return 0.0
    whole = sum(layer.parameters + layer.optimizer for layer in rates.figures.layers)
    held = whole / grid.stages * (1 + state.spec.redundancy.on(grid.pipelines).kept)
    moving = LEAST_PAUSE + held / rates.figures.network.flow
    return moving if state.splits.pause is None else (moving + state.splits.pause) / 2


def pays(now_seconds: float, then_seconds: float, stopped: float, until: float, margin: float = WORTH) -> bool:
    """Are more steps done within that time, although none is in the pause? margin: the share by which a step has to be
    shorter; with workers that run several stages none at all, as a grid without holes is worth more.
    """
    if then_seconds >= (1 - margin) * now_seconds:
        return False
    return (until - stopped) / then_seconds > until / now_seconds


def wait(state: CoordinatorState, then: GridRate, now_seconds: float, stopped: float, now: float) -> float:
    """Seconds for which another grid must have been better before it is taken.

    To grow, as long as the change takes to bring in its pause, since more may come (so waiting costs no more than a
    change too many would), and `elastic.stabilizationSeconds` at most. With workers that run several stages none at
    all, unless workers are on their way that come before the change has brought in its pause.
    """
    brought_in = stopped * now_seconds / max(1e-9, now_seconds - then.seconds)
    if not is_short(state):
        return min(stabilization_seconds(state.spec), max(GATHERING, brought_in))
    gaps = state.grids.gaps
    left = _usual_refill(state) - (now - gaps[-1]) if gaps else 0.0
    return max(0.0, left) if left < brought_in else 0.0


def restart_wait(state: CoordinatorState) -> float:
    """Seconds for which more workers are waited for before a job goes on from a checkpoint with those that are there.

    Those that usually come soon are; else it begins with few, and grows.
    """
    usual = _usual_refill(state)
    return min(stabilization_seconds(state.spec), usual if GATHERING < usual <= SOON else GATHERING)


def _usual_refill(state: CoordinatorState) -> float:
    """Seconds until a worker comes for one that was lost."""
    refills = state.grids.refills
    return median(refills) if refills else USUAL_REFILL
