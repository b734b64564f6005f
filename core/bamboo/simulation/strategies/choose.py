"""All strategies by name, each with the parameters that are best for it under the very nodes that it will see. Pure.

Hindsight is the same for all, and favours none: whoever has more to choose had it from its paper.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import msgspec

from bamboo.planning.splits.resplit import Grid
from bamboo.profiles.profile import ModelProfile
from bamboo.simulation.figures import SimulationError
from bamboo.simulation.strategies.costs import NOTHING, Costs
from bamboo.simulation.strategies.drive import StrategyResult, drive
from bamboo.simulation.strategies.policies.memory_checkpoints import MemoryCheckpoints
from bamboo.simulation.strategies.policies.on_demand import OnDemand
from bamboo.simulation.strategies.policies.quorum import Quorum
from bamboo.simulation.strategies.policies.redundancy import MOST_STAGES, Redundancy
from bamboo.simulation.strategies.policies.rerouting import Rerouting
from bamboo.simulation.strategies.policies.restarting import Restarting
from bamboo.simulation.strategies.policies.templates import Templates
from bamboo.simulation.strategies.policy import Policy
from bamboo.simulation.strategies.saving import blocking, young_daly
from bamboo.simulation.strategies.timeline import steady, timeline
from bamboo.simulation.zone_price import ZONE_TRAFFIC_PRICE
from bamboo.traces.trace import Trace, make_trace, unpriced

MOST_STAGES_TRIED = 32
MOST_TRIED = 4  # numbers of stages, for each of three numbers of nodes
RARELY = (1.0, 10.0, 100.0)  # losses for each one that a strategy does not bear, tried for the interval of checkpoints
TOLERATED = (1, 2, 3)  # f of pipeline templates; Oobleck's default is 3
ON_DEMAND = "on-demand"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a strategy may know. nodes: the most that it holds. usual: how many it has on average. mtbf: seconds between
    two instants of loss.
    """

    costs: Costs
    nodes: int
    usual: int
    mtbf: float

    @property
    def choices(self) -> tuple[int, ...]:
        """Numbers of stages that fit into memory and are not more than the nodes."""
        return self._from(self.costs.least_stages())

    @property
    def double(self) -> tuple[int, ...]:
        """The same, where a device can hold two stages."""
        return self._from(self.costs.least_stages(MOST_STAGES))

    @property
    def tried(self) -> tuple[int, ...]:
        """Of the choices those that may be best, by the speed of an undisturbed grid of all, most or half the nodes."""
        found: set[int] = set()
        for nodes in (self.nodes, self.usual, max(1, self.usual // 2)):
            rates = {stages: self.costs.rate(self.costs.grid(nodes, stages)) for stages in self.choices}
            ordered = sorted((stages for stages in rates if rates[stages]), key=rates.__getitem__, reverse=True)
            found |= set(ordered[:MOST_TRIED])
        return tuple(sorted(found))

    def _from(self, least: int | None) -> tuple[int, ...]:
        most = min(self.nodes, len(self.costs.profile.layers), MOST_STAGES_TRIED)
        return tuple(range(least, most + 1)) if least is not None else ()


def _restart(setting: Setting) -> Iterator[Policy]:
    for stages in setting.tried:
        saving = young_daly(setting.costs, stages, setting.mtbf)
        yield Restarting(costs=setting.costs, choices=(stages,), saving=saving, mtbf=setting.mtbf)


def _blocking(setting: Setting, *, at_every_change: bool = False) -> Iterator[Policy]:
    for stages in setting.tried:
        saving = blocking(setting.costs, stages, setting.mtbf)
        yield Restarting(
            costs=setting.costs, choices=(stages,), saving=saving, mtbf=setting.mtbf, at_every_change=at_every_change
        )  # fmt: skip


def _torchrun_fixed(setting: Setting) -> Iterator[Policy]:
    for stages in setting.tried:
        saving = blocking(setting.costs, stages, setting.mtbf)
        for pipelines in range(1, min(setting.nodes // stages, setting.costs.microbatches) + 1):
            yield Restarting(
                costs=setting.costs, choices=(stages,), saving=saving, mtbf=setting.mtbf,
                fixed=Grid(stages, pipelines),
            )  # fmt: skip


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
                    costs=setting.costs, shortest=shortest, longest=setting.choices[-1], tolerated=tolerated,
                    saving=young_daly(setting.costs, shortest, rarely * setting.mtbf), mtbf=setting.mtbf,
                )  # fmt: skip


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


def _bamboo(setting: Setting) -> Iterator[Policy]:
    usual = setting.costs.best(setting.nodes, setting.double)
    for replicas in (False, True) if usual.cells else ():
        for rarely in RARELY:
            yield Redundancy(
                costs=setting.costs, choices=setting.double, replicas=replicas, mtbf=setting.mtbf,
                saving=young_daly(setting.costs, usual.stages, rarely * setting.mtbf),
            )  # fmt: skip


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
        "bamboo": _bamboo,
    }
)
STRATEGIES = (ON_DEMAND, *SPOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """A model on its machines. nodes: held at most on the spot market. on_demand_nodes: of the baseline. zone_price:
    USD for a GB that crosses zones, and for each of both ways.
    """

    costs: Costs
    nodes: int
    on_demand_nodes: int
    zone_price: float = ZONE_TRAFFIC_PRICE


def workplace(profile: ModelProfile, *, batch: int | None = None, nodes: int | None = None) -> Workplace:
    """Of what was published of a model, unless told otherwise. Raises SimulationError for what is not known."""
    published = profile.published
    if published is None and (batch is None or nodes is None):
        raise SimulationError(
            f"{profile.name}: it says nothing of what was published (field published), such as a batch and a grid;"
            " JOB.yaml says them, too"
        )
    batch = batch if batch is not None or published is None else published.batch
    wanted = nodes if nodes is not None or published is None else published.stages * published.pipelines
    assert batch is not None
    assert wanted is not None
    steady_nodes = published.on_demand_stages * published.on_demand_pipelines if published and nodes is None else wanted
    return Workplace(costs=Costs(calibrated(profile), batch), nodes=wanted, on_demand_nodes=steady_nodes)


def calibrated(profile: ModelProfile) -> ModelProfile:
    """With layers that take a multiple of their time, so that the published on-demand grid has its published step.

    The shipped profiles have it in the simulation of a job, which executes the schedule; this arithmetic is coarser.
    At least a tenth of the layers' time stays.
    """
    published = profile.published
    if published is None:
        return profile
    grid = Grid(published.on_demand_stages, published.on_demand_pipelines)
    low, high = 0.1, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        slow = Costs(_scaled(profile, middle), published.batch).step(grid) > published.on_demand_seconds
        low, high = (low, middle) if slow else (middle, high)
    return _scaled(profile, low)


def _scaled(profile: ModelProfile, factor: float) -> ModelProfile:
    replace = msgspec.structs.replace
    layers = (
        replace(layer, forward=layer.forward * factor, backward=layer.backward * factor) for layer in profile.layers
    )
    return replace(profile, layers=tuple(layers))


def strategy_result(name: str, place: Workplace, trace: Trace, hours: float | None = None) -> StrategyResult:
    """What a strategy comes to under a trace, with its best parameters; no progress if no grid fits into memory. Of a
    trace with several zones it takes the nodes of all, or of one, whichever has the largest product of throughput and
    value: where a tenth more of one buys a tenth less of the other.

    Raises SimulationError if the profile has no prices, or if the trace has no nodes, or prices for others than these.
    """
    profile = place.costs.profile
    if profile.prices is None:
        raise SimulationError(f"{profile.name}: a profile without prices cannot be compared by cost")
    for problem in _problems(trace):
        raise SimulationError(problem)
    found = [_best(name, place, one, hours) for one in (trace, *_single_zones(trace))]
    return max(found, key=lambda one: one.throughput * one.value)


def _single_zones(trace: Trace) -> Iterator[Trace]:
    zones = dict.fromkeys(change.zone for change in trace.changes)
    for zone in zones if len(zones) > 1 else ():
        changes = [change for change in trace.changes if change.zone == zone]
        yield make_trace(changes, trace.prices, duration=trace.duration, source=trace.source)


def _best(name: str, place: Workplace, trace: Trace, hours: float | None) -> StrategyResult:
    """With the parameters that train most."""
    profile = place.costs.profile
    assert profile.prices is not None
    duration = None if hours is None else hours * 3600
    spot = timeline(
        trace, capacity=place.nodes, start=profile.times.start, usd_per_hour=profile.prices.spot, duration=duration
    )
    losses = sum(1 for change in spot.changes if change.lost)
    setting = Setting(
        costs=place.costs,
        nodes=place.nodes,
        usual=max(1, round(spot.node_seconds / spot.duration)),
        mtbf=spot.duration / max(1, losses),
    )
    if name == ON_DEMAND:
        return _on_demand(place, spot.duration / 3600)
    found = (drive(policy, spot, place.zone_price) for policy in SPOT[name](setting))
    best = max(found, key=lambda one: one.samples, default=None)
    return best or drive(OnDemand(costs=place.costs, grid=NOTHING), spot)


def _problems(trace: Trace) -> Iterator[str]:
    if not trace.duration or not trace.changes:
        yield f"{trace.source or 'the trace'}: expected nodes that come and go, and found none"
    if told := unpriced(trace):
        yield told


def _on_demand(place: Workplace, hours: float) -> StrategyResult:
    """The fastest grid that the baseline's nodes form; those that it has no place for are not paid for."""
    costs, prices = place.costs, place.costs.profile.prices
    assert prices is not None
    setting = Setting(costs=costs, nodes=place.on_demand_nodes, usual=place.on_demand_nodes, mtbf=hours * 3600)
    grid = costs.best(place.on_demand_nodes, setting.choices)
    return drive(OnDemand(costs=costs, grid=grid), steady(grid.cells, hours, prices.on_demand))
