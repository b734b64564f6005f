"""What candidates are tried in: the job, the machines that are to be had, and how their nodes come and go. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import msgspec

from bamboo.simulation.job.job_run import JobRun
from bamboo.simulation.job.job_zones import made_up
from bamboo.sizing.trials.candidate import Candidate, job_of
from bamboo.sizing.trials.zone_supply import ZoneSupply, best_first, zone_supplies
from bamboo.traces.generate import Generation
from bamboo.traces.summary import summarize
from bamboo.traces.window import window
from bamboo_core.job.placement_spec import Capacity, pool_price
from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.profile import ModelProfile
from bamboo_core.planning.profile import Prices as ProfilePrices
from bamboo_core.prices.price_list import MachinePrice, zone_price
from bamboo_core.traces.trace import PriceChange, Trace, make_trace

HOUR: Final = 3600.0
OTHER_SEED: Final = 1_000_000  # from a seed to the one that is taken in its place
TRIES: Final = 3  # seeds that may be taken for one run


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineKind:
    """One kind."""

    name: str
    profile: ModelProfile  # with its prices in it
    # None if no price file names it; then those of the trace, the job's pools and the profile count
    price: MachinePrice | None = None


@dataclass(frozen=True, kw_only=True)
class Market:
    """Nodes: either a recording, of which a seed is another place to begin, or made up. spot nodes only.

    Both only in zones in which the job may be.
    """

    recording: Trace | None = None
    generation: Generation | None = None

    @property
    def zones(self) -> tuple[str, ...]:
        if self.recording is not None:
            return tuple(sorted({change.zone for change in self.recording.changes}))
        return self.generation.zones if self.generation else ()

    @cached_property
    def supplies(self) -> Mapping[str, ZoneSupply]:
        """The supply of each zone of a recording; {} if nodes are made up, the same in all zones."""
        return zone_supplies(self.recording) if self.recording is not None else {}

    @cached_property
    def _loss_rate(self) -> float:
        """The losses of a node in an hour."""
        if self.recording is not None:
            return summarize(self.recording).removals_per_node_hour
        return self.generation.removal if self.generation else 0.0

    def losses_per_hour(self, workers: int) -> float:
        """The losses of so many nodes in an hour, about."""
        return workers * self._loss_rate

    @property
    def settled_hours(self) -> float:
        """The hours after which made-up nodes have forgotten that all were there at the beginning; at most a few."""
        if self.generation is None:
            return 0.0
        return 3 / max(0.5, self.generation.removal + self.generation.addition)

    def trace(self, spec: JobSpec, seed: int, seeds: int, seconds: float) -> Trace:
        """A recording for a job: made up are as many nodes as it wants, in the zones where its pods may be.

        seed: from 1 on. seeds: how many there will be; recordings begin at as many places, evenly spread, and for a
        seed in the place of another one between that place and the next.
        """
        if self.recording is not None:
            turn, number = divmod(seed - 1, OTHER_SEED)
            place = (number % seeds + turn / TRIES) / seeds
            return window(self.recording, place * self.recording.duration, seconds)
        assert self.generation is not None
        made = made_up(replace(self.generation, hours=max(0.01, seconds / HOUR)), spec, seed)
        return make_trace(made.changes, made.prices, duration=seconds, source=made.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What candidates are simulated in."""

    spec: JobSpec
    document: Mapping[str, Any]
    machines: Mapping[str, MachineKind]
    market: Market
    hours: float  # after which runs are cut
    seeds: int  # at most, of one candidate
    traffic_price: float  # USD for a GB that crosses zones, for each of both ways

    @property
    def steps(self) -> int:
        """The steps of the whole job."""
        return self.spec.training.steps

    def spot_usd(self, machine: str, zone: str) -> float:
        """The USD of a node in that zone for an hour, on average over time; of all zones, if it is "". 1 if it is not
        known.
        """
        known = [one for one in self.market.zones if one]
        if not zone and known:
            return sum(self.spot_usd(machine, one) for one in known) / len(known)
        kind = self.machines[machine]
        recorded = self.market.supplies[zone].usd if zone in self.market.supplies else None
        listed = zone_price(kind.price, zone)
        usual = kind.profile.prices.spot if kind.profile.prices else 1.0
        return next((price for price in (recorded, listed) if price is not None), usual)

    def on_demand_usd(self, machine: str) -> float | None:
        """The USD of a node on demand for an hour: of the price file or the profile, else of the job's first pool on
        demand that says it; None if it is not known, or if the price file has none.
        """
        kind = self.machines[machine]
        if kind.price is not None and kind.price.on_demand is None:
            return None
        if kind.profile.prices is not None:
            return kind.profile.prices.on_demand
        return self.spec.spread.node_price(pool_price(self.spec.node_pools, Capacity.ON_DEMAND))

    def zones_for(self, machine: str, workers: int) -> list[str]:
        """The zones for so many workers that are to be in one zone, the best one first; [] if it makes no difference in
        which one they are, or if nobody knows.
        """
        zones = [zone for zone in self.market.zones if zone]
        prices = {zone: self.spot_usd(machine, zone) for zone in zones}
        if len(zones) < 2 or (self.market.recording is None and len(set(prices.values())) == 1):
            return []
        return best_first(prices, self.market.supplies, self.spec.spread.nodes(workers))

    def run(self, candidate: Candidate, seed: int, seconds: float) -> JobRun | None:
        """The run of a candidate; None if the manifest's rules do not allow it."""
        made = job_of(candidate, self.spec, self.document)
        if made is None:
            return None
        spec, document = made
        machine = self.machines[candidate.machine]
        trace = _priced(self.market.trace(spec, seed, self.seeds, seconds), machine.price)
        return JobRun(
            spec=with_prices(spec, machine.price),
            manifest=document,
            profile=machine.profile,
            trace=trace,
            seconds=seconds,
            zone_price=self.traffic_price,
        )


def with_prices(spec: JobSpec, price: MachinePrice | None) -> JobSpec:
    """The price file comes before what the job's pools say: they say nothing any more."""
    if price is None:
        return spec
    pools = tuple(replace(pool, price_per_hour=None) for pool in spec.node_pools)
    return replace(spec, node_pools=pools)


def machine_of(name: str, profile: ModelProfile, price: MachinePrice | None) -> MachineKind:
    """The machine with the price file's prices in place of the profile's."""
    if price is not None:
        on_demand = price.on_demand if price.on_demand is not None else _on_demand(profile, price)
        known = ProfilePrices(spot=price.spot, on_demand=on_demand)
        profile = msgspec.structs.replace(profile, prices=known)
    return MachineKind(name=name, profile=profile, price=price)


def has_price(machine: MachineKind, spec: JobSpec, market: Market) -> bool:
    spot = [pool for pool in spec.node_pools if pool.capacity is Capacity.SPOT]
    recorded = market.recording is not None and bool(market.recording.prices)
    return machine.profile.prices is not None or recorded or any(pool.price_per_hour is not None for pool in spot)


def _on_demand(profile: ModelProfile, price: MachinePrice) -> float:
    return profile.prices.on_demand if profile.prices else price.spot


def _priced(trace: Trace, price: MachinePrice | None) -> Trace:
    """A recording's own prices over time come first; else those of single zones are the file's."""
    if price is None or trace.prices or not price.zones:
        return trace
    prices = [PriceChange(at=0.0, zone="", usd_per_hour=price.spot)]
    prices += [PriceChange(at=0.0, zone=zone, usd_per_hour=one.spot) for zone, one in price.zones.items()]
    return make_trace(trace.changes, prices, duration=trace.duration, source=trace.source)
