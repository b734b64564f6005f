"""What candidates are tried in: the job, the machines that are to be had, and how their nodes come and go. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any, Final

import msgspec

from bamboo.simulation.job.job_run import JobRun
from bamboo.simulation.job.job_zones import made_up
from bamboo.sizing.price_list import MachinePrice
from bamboo.sizing.trials.candidate import Candidate, job_of
from bamboo.traces.generate import Generation
from bamboo.traces.summary import summarize
from bamboo.traces.trace import Trace, make_trace, price_series
from bamboo.traces.window import window
from bamboo_core.job.placement_spec import Capacity, pool_price
from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.profile import ModelProfile
from bamboo_core.planning.profile import Prices as ProfilePrices

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

    def spot_usd(self, usual: float) -> float:
        """Return the USD of a spot node for an hour, on average over time and zones. usual: of a zone for which no
        recording says a price.
        """
        found = [usual if price is None else price for price in self._recorded_usd]
        return fmean(found) if found else usual

    @cached_property
    def _recorded_usd(self) -> tuple[float | None, ...]:
        """The mean price in each zone of a recording that has a name; None where it says none."""
        if self.recording is None:
            return ()
        return tuple(_mean_price(self.recording, zone) for zone in self.zones if zone)

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

    def spot_usd(self, machine: str) -> float:
        """Return the USD of a spot node for an hour, on average; 1 if it is not known."""
        prices = self.machines[machine].profile.prices
        return self.market.spot_usd(prices.spot if prices else 1.0)

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

    def run(self, candidate: Candidate, seed: int, seconds: float) -> JobRun | None:
        """The run of a candidate; None if the manifest's rules do not allow it."""
        made = job_of(candidate, self.spec, self.document)
        if made is None:
            return None
        spec, document = made
        machine = self.machines[candidate.machine]
        return JobRun(
            spec=with_prices(spec, machine.price),
            manifest=document,
            profile=machine.profile,
            trace=self.market.trace(spec, seed, self.seeds, seconds),
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


def _mean_price(trace: Trace, zone: str) -> float | None:
    """Return the USD of a node in that zone for an hour, on average over time; None if the recording does not say."""
    series = price_series(trace, zone)
    if not series:
        return None
    ends = [*(price.at for price in series[1:]), max(trace.duration, series[-1].at)]
    begins = [0.0, *(price.at for price in series[1:])]
    spans = [end - begin for begin, end in zip(begins, ends, strict=True)]
    if not sum(spans):
        return series[-1].usd_per_hour
    return sum(one.usd_per_hour * span for one, span in zip(series, spans, strict=True)) / sum(spans)
