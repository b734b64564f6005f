"""The world in which candidates are simulated: the job, machines with profiles and prices, and nodes. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist
from typing import Any, Final

import msgspec

from bamboo.simulation.job.job_run import JobRun
from bamboo.simulation.job.job_zones import made_up
from bamboo.sizing.price_list import MachinePrice
from bamboo.sizing.trials.candidate import Candidate, job_of
from bamboo.traces.generate import Generation
from bamboo.traces.summary import NodeTraceSummary, nodes_over_time, summarize
from bamboo.traces.trace import Trace, make_trace
from bamboo.traces.window import window
from bamboo_core.job.placement_spec import Capacity, pool_price
from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.profile import ModelProfile
from bamboo_core.planning.profile import Prices as ProfilePrices

HOUR: Final = 3600.0
LOSSES: Final = 10.0  # expected in a run after made-up nodes have settled
LEAST_SHARE: Final = 1e-6  # of time; smaller shares are left out


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineKind:
    """A kind of machine: the model's profile on it, and its price."""

    profile: ModelProfile  # with its prices in it
    # None if no price file names it; then those of the trace, the job's pools and the profile count
    price: MachinePrice | None = None


@dataclass(frozen=True, kw_only=True)
class Market:
    """A supply of spot nodes in the job's zones: a recorded trace, or settings for generated nodes.
    A run's seed selects a window of the recording, or seeds the generation.
    """

    recording: Trace | None = None
    generation: Generation | None = None

    @property
    def zones(self) -> tuple[str, ...]:
        if self.recording is not None:
            return tuple(sorted({change.zone for change in self.recording.changes}))
        return self.generation.zones if self.generation else ()

    @cached_property
    def figures(self) -> NodeTraceSummary | None:
        """The figures of the recording; None for generated nodes."""
        return summarize(self.recording) if self.recording is not None else None

    def losses_per_hour(self, workers: int) -> float:
        """Return the expected number of nodes that a job with `workers` nodes loses in an hour."""
        if self.figures is not None:
            return workers * self.figures.removals_per_node_hour
        return workers * self.generation.removal if self.generation else 0.0

    def availability(self, workers: int, hours: float) -> tuple[tuple[float, int], ...]:
        """Return pairs of (share of the job's time, available nodes) for a job that wants `workers` nodes.

        hours: the job's duration. All generated nodes are available at the beginning; the share of missing ones grows
        towards a limit, or stays 0 if none are removed.
        """
        if self.recording is not None:
            return tuple((share, min(workers, nodes)) for share, nodes in self._nodes_recorded)
        lost, back = (self.generation.removal, self.generation.addition) if self.generation else (0.0, 1.0)
        if not lost:
            return ((1.0, workers),)
        times = (back + lost) * hours  # hours, in units of that growth's time constant
        missing = lost / (back + lost) * (1 + math.expm1(-times) / times)
        nodes = NormalDist(workers * (1 - missing), math.sqrt(workers * missing * (1 - missing)))
        shares = [(nodes.cdf(n + 0.5) - nodes.cdf(n - 0.5), n) for n in range(workers + 1)]
        whole = sum(share for share, _ in shares)
        return tuple((share / whole, n) for share, n in shares if share > LEAST_SHARE)

    @cached_property
    def _nodes_recorded(self) -> tuple[tuple[float, int], ...]:
        """The share of the recording's time with each number of nodes, as pairs (share, nodes)."""
        assert self.recording is not None
        steps, end = nodes_over_time(self.recording), self.recording.duration
        times: dict[int, float] = {}
        for (at, nodes), (after, _) in pairwise([*steps, (end, 0)]):
            times[nodes] = times.get(nodes, 0.0) + after - at
        return tuple((seconds / end, nodes) for nodes, seconds in times.items()) if end else ((1.0, steps[-1][1]),)

    @property
    def settled_hours(self) -> float:
        """The hours after which generated nodes no longer depend on the start, at most 6; 0 for a recording."""
        if self.generation is None:
            return 0.0
        return 3 / max(0.5, self.generation.removal + self.generation.addition)

    def trace(self, spec: JobSpec, seed: int, seeds: int, seconds: float) -> Trace:
        """Return the trace of a run: a window of the recording, or as many generated nodes as the job wants.

        seed: from 1. seeds: the number of seeds; their windows are evenly spaced. seconds: the trace's duration.
        """
        if self.recording is not None:
            return window(self.recording, (seed - 1) % seeds / seeds * self.recording.duration, seconds)
        assert self.generation is not None
        made = made_up(replace(self.generation, hours=max(0.01, seconds / HOUR)), spec, seed)
        return make_trace(made.changes, made.prices, duration=seconds, source=made.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The input that all candidates share: the job, the kinds of machines, and the supply of spot nodes."""

    spec: JobSpec
    document: Mapping[str, Any]
    machines: Mapping[str, MachineKind]  # by name
    market: Market
    hours: float  # after which runs are cut at the latest
    seeds: int  # the number of runs of each candidate
    traffic_price: float  # USD per GB that crosses zones, in each direction

    @property
    def steps(self) -> int:
        """The number of steps of the whole job."""
        return self.spec.training.steps

    def spot_usd(self, machine: str) -> float:
        """Return the mean USD per hour of a spot node: the recording's, else the price file's, the job's or the
        profile's; 1 if all are unknown.
        """
        figures = self.market.figures
        if figures is not None and figures.usd_per_hour is not None:
            return figures.usd_per_hour
        price, prices = self._pools_usd(machine, Capacity.SPOT), self.machines[machine].profile.prices
        return price if price is not None else prices.spot if prices else 1.0

    def on_demand_usd(self, machine: str) -> float | None:
        """Return the USD per hour of an on-demand node: the price file's, else the job's or the profile's; None if
        unknown, or if the price file names only a spot price.
        """
        kind = self.machines[machine]
        if kind.price is not None and kind.price.on_demand is None:
            return None
        price, prices = self._pools_usd(machine, Capacity.ON_DEMAND), kind.profile.prices
        return price if price is not None else prices.on_demand if prices else None

    def _pools_usd(self, machine: str, capacity: Capacity) -> float | None:
        """Return a node's USD per hour in the job's pools; None if unknown or replaced by the price file."""
        if self.machines[machine].price is not None:
            return None
        return self.spec.spread.node_price(pool_price(self.spec.node_pools, capacity))

    def run(self, candidate: Candidate, seed: int) -> JobRun:
        """Return the input of a simulated run of a candidate, which the manifest's rules must allow.

        The run lasts until generated nodes have settled and LOSSES more losses are expected, but at most `hours`.
        """
        rate = self.market.losses_per_hour(candidate.workers)
        seconds = HOUR * min(self.hours, self.market.settled_hours + LOSSES / rate if rate else math.inf)
        made = job_of(candidate, self.spec, self.document)
        assert made is not None
        spec, document = made
        machine = self.machines[candidate.machine]
        if machine.price is not None:  # the price file overrides the prices of pools
            spec = replace(spec, node_pools=tuple(replace(pool, price_per_hour=None) for pool in spec.node_pools))
        return JobRun(
            spec=spec,
            manifest=document,
            profile=machine.profile,
            trace=self.market.trace(spec, seed, self.seeds, seconds),
            seconds=seconds,
            zone_price=self.traffic_price,
        )


def machine_of(profile: ModelProfile, price: MachinePrice | None) -> MachineKind:
    """Return a machine with the prices of `price`, if any; onDemand defaults to the profile's, else the spot price."""
    if price is not None:
        usual = profile.prices.on_demand if profile.prices else price.spot
        known = ProfilePrices(spot=price.spot, on_demand=usual if price.on_demand is None else price.on_demand)
        profile = msgspec.structs.replace(profile, prices=known)
    return MachineKind(profile=profile, price=price)


def has_price(machine: MachineKind, spec: JobSpec, market: Market) -> bool:
    spot = [pool for pool in spec.node_pools if pool.capacity is Capacity.SPOT]
    recorded = market.recording is not None and bool(market.recording.prices)
    return machine.profile.prices is not None or recorded or any(pool.price_per_hour is not None for pool in spot)
