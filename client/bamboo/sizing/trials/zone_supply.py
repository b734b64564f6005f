"""What each zone of a market has and costs, and so in which one a job that stays in a single zone should be. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from bamboo.traces.summary import nodes_over_time
from bamboo_core.prices.price_list import MachinePrice
from bamboo_core.traces.trace import Trace, price_series

ENOUGH: Final = 0.9  # of the most that any zone has of what a job wants: a zone with so much is worth its price


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneSupply:
    """The supply of one zone of a recording."""

    counts: Mapping[int, float]  # for how long (seconds) it had so many nodes
    usd: float | None  # of a node for an hour, on average over time; None if the recording does not say

    def mean(self, wanted: int) -> float:
        """Nodes on average, of so many that are wanted."""
        seconds = sum(self.counts.values())
        return sum(min(count, wanted) * time for count, time in self.counts.items()) / seconds if seconds else 0.0


def zone_supplies(trace: Trace) -> dict[str, ZoneSupply]:
    """The supplies by the names of a recording's zones; nodes of which no zone is known are left out."""
    found = {}
    for zone in sorted({change.zone for change in trace.changes} - {""}):
        counts: dict[int, float] = {}
        for (at, count), (after, _) in pairwise([*nodes_over_time(trace, zone), (trace.duration, 0)]):
            counts[count] = counts.get(count, 0.0) + after - at
        found[zone] = ZoneSupply(counts=counts, usd=_mean_price(trace, zone))
    return found


def unknown_zones(price: MachinePrice, zones: Sequence[str]) -> list[str]:
    """Zones of a price file in which there are no nodes."""
    return [name for name in price.zones if not any(zone.startswith(name) for zone in zones)]


def best_first(prices: Mapping[str, float], supplies: Mapping[str, ZoneSupply], wanted: int) -> list[str]:
    """The zones, for a job of so many nodes: by price those that have nearly as much as any, then the others by what
    they have. supplies: {} if all have the same. Equal ones stay in the order given.
    """
    have = {zone: supplies[zone].mean(wanted) if zone in supplies else float(wanted) for zone in prices}
    most = max(have.values(), default=0.0)
    enough = {zone for zone in prices if have[zone] >= ENOUGH * most}
    return sorted(prices, key=lambda zone: (zone not in enough, prices[zone] if zone in enough else -have[zone]))


def _mean_price(trace: Trace, zone: str) -> float | None:
    series = price_series(trace, zone)
    if not series:
        return None
    ends = [*(price.at for price in series[1:]), max(trace.duration, series[-1].at)]
    begins = [0.0, *(price.at for price in series[1:])]
    spans = [end - begin for begin, end in zip(begins, ends, strict=True)]
    if not sum(spans):
        return series[-1].usd_per_hour
    return sum(one.usd_per_hour * span for one, span in zip(series, spans, strict=True)) / sum(spans)
