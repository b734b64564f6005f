"""Figures of a recording of spot nodes: the number of nodes over time, the rate of removals, the mean price. Pure."""

from dataclasses import dataclass
from itertools import pairwise

from bamboo.traces.trace import Change, Trace, price_series, removal_times
from bamboo_core.job.budget_reach import HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTraceSummary:
    """The figures that `bamboo plan` uses from a trace: peak number of nodes, rate of removals, and mean price."""

    peak: int  # most nodes at one time
    removals_per_node_hour: float
    # the nodes' mean price, over time and nodes; None if a node has no price, or if no node is present for any time
    usd_per_hour: float | None


def summarize(trace: Trace) -> NodeTraceSummary:
    """Return the figures of a trace. The rate of removals is 0 if no node is present for any time."""
    steps = nodes_over_time(trace)
    node_seconds = sum(count * (after - at) for (at, count), (after, _) in pairwise([*steps, (trace.duration, 0)]))
    node_hours = node_seconds / HOUR
    return NodeTraceSummary(
        peak=max(count for _, count in steps),
        removals_per_node_hour=len(removal_times(trace)) / node_hours if node_hours else 0.0,
        usd_per_hour=_mean_price(trace),
    )


def nodes_over_time(trace: Trace, zone: str | None = None) -> tuple[tuple[float, int], ...]:
    """Return the number of nodes over time: (seconds, nodes from then on) at 0 and each change. zone: None for all."""
    counts, count = {0.0: 0}, 0
    for change in trace.changes:
        if zone is None or change.zone == zone:
            count += 1 if change.change is Change.ADD else -1
            counts[change.at] = count
    return tuple(counts.items())


def _mean_price(trace: Trace) -> float | None:
    """Return the nodes' mean price in USD per hour; None if a zone has no price, or no node is present for any time."""
    cost = node_seconds = 0.0
    for zone in sorted({change.zone for change in trace.changes}):
        series = price_series(trace, zone)
        if not series:
            return None
        counts, prices = dict(nodes_over_time(trace, zone)), {price.at: price.usd_per_hour for price in series}
        moments = sorted(counts.keys() | prices.keys())
        count, price = 0, series[0].usd_per_hour
        for at, after in pairwise([*moments, max(trace.duration, moments[-1])]):
            count, price = counts.get(at, count), prices.get(at, price)
            cost += count * price * (after - at)
            node_seconds += count * (after - at)
    return cost / node_seconds if node_seconds else None
