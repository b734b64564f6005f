"""The choice of each strategy's parameters, zones and number of nodes: the best in hindsight for its nodes. Pure.

All strategies have the same hindsight, so it favours none: some have more parameters because their papers do. The
objective decides which result is the best.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Final

from bamboo.simulation.figures import SimulationError
from bamboo.simulation.job.zone_traffic import ZONE_TRAFFIC_PRICE
from bamboo.traces.trace import Trace, make_trace, unpriced
from bamboo_core.planning.splits.resplit_plans import Grid
from strategies.costs import NOTHING, Costs
from strategies.drive import StrategyResult, drive
from strategies.fixed_grids import kept_seconds, standings
from strategies.memory_checkpoints import MemoryCheckpoints
from strategies.policy import Placement, Policy, Reaction, Saving, View, blocking, young_daly
from strategies.quorum import Quorum
from strategies.rerouting import Rerouting
from strategies.restarting import Restarting
from strategies.templates import Templates
from strategies.timeline import Timeline, steady, timeline

MOST_STAGES_TRIED = 32
MOST_TRIED = 4  # numbers of stages, for each of three numbers of nodes
RARELY = (1.0, 10.0, 100.0)  # losses per unbearable loss, tried for the interval of checkpoints
ABOUT = 0.999  # of the best fixed grid's samples: grids that train this much are simulated, too
NO_NODES: Final = Timeline(duration=0.0, changes=(), node_seconds=0.0, usd=0.0, removed=0)
TOLERATED = (1, 2, 3)  # f of pipeline templates; Oobleck's default is 3
ON_DEMAND = "on-demand"
SIZES = (1.0, 0.75, 0.625, 0.5)  # of the most nodes, tried if the objective is value
REGION = re.compile(r"^(.*\d)-?[a-z]$|^([a-z]+\d?)-\d$")
AS_FAST = 0.95  # relative to on-demand nodes: the least speed if the objective is value


class Aim(StrEnum):
    """The objective by which parameters, nodes and zones are chosen. VALUE: samples per dollar among results that are
    about as fast as on-demand nodes; if none is, samples per second.
    """

    THROUGHPUT = "Throughput"
    VALUE = "Value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The costs and nodes for which a strategy's parameters are chosen."""

    costs: Costs
    nodes: int  # the most that it holds
    usual: int  # the mean that it has
    mtbf: float  # seconds between two moments with losses
    spot: Timeline = NO_NODES  # the nodes that it will see

    @property
    def choices(self) -> tuple[int, ...]:
        """The numbers of stages, up to MOST_STAGES_TRIED, for which these nodes have a grid that fits into memory."""
        most = min(self.nodes, len(self.costs.profile.layers), MOST_STAGES_TRIED)
        return tuple(stages for stages in range(1, most + 1) if self.costs.fills(self.nodes, stages))

    @property
    def tried(self) -> tuple[int, ...]:
        """The numbers of stages of the fastest undisturbed grids: at most MOST_TRIED each for all nodes, for the usual
        number of nodes, and for half of that number.
        """
        choices = self.choices
        several = (self.nodes, self.usual, max(1, self.usual // 2))
        best = {stages for nodes in several for stages in self.costs.best_stages(nodes, choices, MOST_TRIED)}
        return tuple(sorted(best))


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDemand:
    """A policy for nodes that are never taken away: they form their grid once, and train."""

    costs: Costs
    grid: Grid  # fixed
    saving: None = None

    def begin(self) -> None:
        """Return the initial state, which is None: the policy has no state."""

    def react(self, state: None, view: View) -> tuple[None, Reaction | None]:
        return None, Reaction(rate=self.costs.rate(self.grid)) if len(view.ready) >= self.grid.cells else None

    def placement(self, state: None) -> Placement:
        """Return an empty placement: on-demand nodes are all in one zone."""
        return Placement()


def _restart(setting: Setting) -> Iterator[Policy]:
    for stages in setting.tried:
        saving = young_daly(setting.costs, stages, setting.mtbf)
        yield Restarting(costs=setting.costs, choices=(stages,), saving=saving, mtbf=setting.mtbf)


def _blocking(setting: Setting, *, at_every_change: bool = False) -> Iterator[Policy]:
    for stages in setting.tried:
        saving = blocking(setting.costs, stages, setting.mtbf)
        yield Restarting(
            costs=setting.costs, choices=(stages,), saving=saving, mtbf=setting.mtbf, at_every_change=at_every_change
        )


def _torchrun_fixed(setting: Setting) -> Iterator[Policy]:
    """Yield a policy for each fitting grid with one of the `tried` numbers of stages. If all nodes are in one zone, so
    that no grid pays for traffic, skip grids that train clearly less than the best one, judged by restarts alone.
    """
    savings = {stages: blocking(setting.costs, stages, setting.mtbf) for stages in setting.tried}
    grids = [
        grid
        for stages in savings
        for grid in (Grid(stages, d) for d in range(1, min(setting.nodes // stages, setting.costs.microbatches) + 1))
        if setting.costs.fits(grid)
    ]
    for grid in grids if setting.spot.zones else _most_trained(setting, grids, savings):
        yield Restarting(
            costs=setting.costs, choices=(grid.stages,), saving=savings[grid.stages], mtbf=setting.mtbf, fixed=grid
        )


def _most_trained(setting: Setting, grids: Sequence[Grid], savings: Mapping[int, Saving]) -> list[Grid]:
    """Return the grids that train about as much as the best one, in the given order. Computes step times only for grids
    that could train enough if a step took the least possible time.
    """
    costs, stood = setting.costs, standings(setting.spot, {grid.cells for grid in grids})

    def kept(grid: Grid) -> float:
        stages = grid.stages
        return kept_seconds(stood[grid.cells], savings[stages], costs.restart(stages), costs.detection)

    seconds = {grid: kept(grid) for grid in grids}
    samples: dict[Grid, float] = {}  # samples
    most = 0.0
    for bound, grid in sorted(((seconds[grid] * costs.most_rate(grid), grid) for grid in grids), reverse=True):
        if bound < ABOUT * most:
            break
        samples[grid] = seconds[grid] * costs.rate(grid) if seconds[grid] else 0.0
        most = max(most, samples[grid])
    return [grid for grid in grids if most and samples.get(grid, 0.0) >= ABOUT * most]


def _morphing(setting: Setting) -> Iterator[Policy]:
    usual = setting.costs.best(setting.nodes, setting.choices)
    if usual.cells:
        saving = young_daly(setting.costs, usual.stages, setting.mtbf)
        yield Restarting(costs=setting.costs, choices=setting.choices, saving=saving, mtbf=setting.mtbf)


def _templates(setting: Setting) -> Iterator[Policy]:
    for shortest in setting.tried:
        for tolerated in TOLERATED:
            for rarely in RARELY[1:]:
                yield Templates(
                    costs=setting.costs,
                    shortest=shortest,
                    longest=setting.choices[-1],
                    tolerated=tolerated,
                    saving=young_daly(setting.costs, shortest, rarely * setting.mtbf),
                    mtbf=setting.mtbf,
                )


def _rerouting(setting: Setting) -> Iterator[Policy]:
    for stages in setting.tried:
        for rarely in RARELY:
            saving = young_daly(setting.costs, stages, rarely * setting.mtbf)
            yield Rerouting(costs=setting.costs, stages=stages, saving=saving)


def _memory(setting: Setting) -> Iterator[Policy]:
    for stages in setting.tried:
        for rarely in RARELY[1:]:
            saving = young_daly(setting.costs, stages, rarely * setting.mtbf)
            yield MemoryCheckpoints(costs=setting.costs, stages=stages, saving=saving)


def _quorum(setting: Setting) -> Iterator[Policy]:
    for stages in setting.tried:
        grid = setting.costs.grid(setting.nodes, stages)
        for rarely in RARELY:
            saving = young_daly(setting.costs, stages, rarely * setting.mtbf)
            yield Quorum(costs=setting.costs, grid=grid, saving=saving)


SPOT: Mapping[str, Callable[[Setting], Iterator[Policy]]] = MappingProxyType(
    {
        "checkpoint": _restart,
        "checkpoint-blocking": _blocking,
        "torchrun-elastic": partial(_blocking, at_every_change=True),
        "torchrun-fixed": _torchrun_fixed,
        "morphing": _morphing,
        "templates": _templates,
        "rerouting": _rerouting,
        "memory-checkpoints": _memory,
        "quorum": _quorum,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """The machines of a job, and their costs."""

    costs: Costs
    nodes: int  # the most held on the spot market
    on_demand_nodes: int  # of the baseline
    zone_price: float = ZONE_TRAFFIC_PRICE  # USD per GB that crosses zones, in each direction


def chosen(outcomes: Iterable[StrategyResult], objective: Aim, speed: float) -> StrategyResult:
    """Return the best result by the objective. speed: samples per second of on-demand nodes."""
    results = list(outcomes)
    fast = [one for one in results if one.throughput >= AS_FAST * speed]
    if objective is Aim.VALUE and fast:
        return max(fast, key=lambda one: (one.value, one.throughput))
    return max(results, key=lambda one: (one.throughput, one.value))


def strategy_result(
    name: str,
    place: Workplace,
    trace: Trace,
    hours: float | None = None,
    objective: Aim = Aim.THROUGHPUT,
) -> StrategyResult:
    """Return a strategy's result under a trace, with the parameters, zones and nodes that are best by the objective.

    The result is without progress if no grid fits into memory. Raises SimulationError if the profile has no prices, or
    if the trace has no nodes, or prices for some of its zones only.
    """
    check(place, trace)
    if name == ON_DEMAND:
        return chosen(_on_demand(place, _hours(trace, hours)), objective, on_demand_speed(place))
    results = (
        result
        for part in zone_choices(trace)
        for nodes in sizes(place.nodes, objective)
        for result in _tried(name, place, part, hours, nodes)
    )
    nothing = drive(OnDemand(costs=place.costs, grid=NOTHING), _timeline(place, trace, hours, place.nodes))
    return chosen([nothing, *results], objective, on_demand_speed(place))


def sizes(nodes: int, objective: Aim) -> tuple[int, ...]:
    """Return the limits to try for a job's nodes: for throughput only `nodes`, for value fractions of it."""
    if objective is Aim.THROUGHPUT:
        return (nodes,)
    return tuple(dict.fromkeys(max(1, round(nodes * size)) for size in SIZES))


def on_demand_speed(place: Workplace) -> float:
    """Return the samples per second of the fastest grid of on-demand nodes."""
    return place.costs.rate(_steady_grid(place))


def zone_choices(trace: Trace) -> Iterator[Trace]:
    """Yield the part of the trace for each choice of zones: all zones of a region, or a single zone. Pipelines never
    cross regions, because links between regions are worse than within one.
    """
    zones = list(dict.fromkeys(change.zone for change in trace.changes))
    regions: dict[str, list[str]] = {}
    for zone in zones:
        regions.setdefault(region_of(zone), []).append(zone)
    several = [tuple(names) for names in regions.values() if len(names) > 1]
    for names in (*several, *((zone,) for zone in zones)):
        changes = [change for change in trace.changes if change.zone in names]
        yield make_trace(changes, trace.prices, duration=trace.duration, source=trace.source)


def region_of(zone: str) -> str:
    """Return the region of a zone, by the clouds' naming: us-east-1a is in us-east-1, us-central1-b in us-central1,
    eastus-2 in eastus. Zones with other names share one region.
    """
    match = REGION.match(zone)
    return match.group(1) or match.group(2) if match else ""


def check(place: Workplace, trace: Trace) -> None:
    """Raise SimulationError if the profile lacks prices, or if the trace has no nodes or prices for some zones only."""
    profile = place.costs.profile
    if profile.prices is None:
        raise SimulationError(f"{profile.name}: a profile without prices cannot be compared by cost")
    for problem in _problems(trace):
        raise SimulationError(problem)


def _hours(trace: Trace, hours: float | None) -> float:
    return trace.duration / 3600 if hours is None else min(hours, trace.duration / 3600)


def _timeline(place: Workplace, trace: Trace, hours: float | None, nodes: int) -> Timeline:
    profile = place.costs.profile
    assert profile.prices is not None
    return timeline(
        trace,
        capacity=nodes,
        start=profile.times.start,
        usd_per_hour=profile.prices.spot,
        duration=None if hours is None else hours * 3600,
    )


def _tried(name: str, place: Workplace, trace: Trace, hours: float | None, nodes: int) -> Iterator[StrategyResult]:
    """Yield the results of a strategy for each choice of its parameters."""
    spot = _timeline(place, trace, hours, nodes)
    losses = sum(1 for change in spot.changes if change.lost)
    setting = Setting(
        costs=place.costs,
        nodes=nodes,
        usual=max(1, round(spot.node_seconds / spot.duration)),
        mtbf=spot.duration / max(1, losses),
        spot=spot,
    )
    return (drive(policy, spot, place.zone_price) for policy in SPOT[name](setting))


def _problems(trace: Trace) -> Iterator[str]:
    if not trace.duration or not trace.changes:
        yield f"{trace.source or 'the trace'}: expected nodes that come and go, and found none"
    if problem := unpriced(trace):
        yield problem


def _on_demand(place: Workplace, hours: float) -> Iterator[StrategyResult]:
    """Yield the results of the on-demand baseline with all its nodes, and with only the nodes of its fastest grid."""
    costs, prices = place.costs, place.costs.profile.prices
    assert prices is not None
    grid = _steady_grid(place)
    for held in dict.fromkeys((place.on_demand_nodes, grid.cells or place.on_demand_nodes)):
        yield drive(OnDemand(costs=costs, grid=grid), steady(held, hours, prices.on_demand))


def _steady_grid(place: Workplace) -> Grid:
    nodes = place.on_demand_nodes
    setting = Setting(costs=place.costs, nodes=nodes, usual=nodes, mtbf=1.0)
    return place.costs.best(nodes, setting.choices)
