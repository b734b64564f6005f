"""Figures of a recording: nodes, removals, lifetimes, prices. Pure."""

import statistics
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from bamboo.traces.trace import Change, Trace, price_series, removal_times

HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTraceSummary:
    """Figures of a trace: times in seconds, rates by the hour. Lifetimes are of removed nodes, None without any."""

    duration: float
    added: int
    removed: int
    peak: int
    mean_nodes: float
    node_hours: float
    removals_per_hour: float
    removals_per_node_hour: float
    removal_instants: int
    largest_batch: int  # most nodes that were taken away at one instant
    mean_lifetime: float | None
    median_lifetime: float | None
    zones: tuple[str, ...]
    # the nodes' mean price, over time and nodes; None if the trace has no price for one of its nodes
    usd_per_hour: float | None


def summarize(trace: Trace) -> NodeTraceSummary:
    """Return the figures of a trace. Rates are 0 if it lasts no time."""
    steps = nodes_over_time(trace)
    node_seconds = sum(count * (after - at) for (at, count), (after, _) in pairwise([*steps, (trace.duration, 0)]))
    removed = removal_times(trace)
    batches = Counter(removed).values()
    lifetimes = _lifetimes(trace)
    hours, node_hours = trace.duration / HOUR, node_seconds / HOUR
    return NodeTraceSummary(
        duration=trace.duration,
        added=len(trace.changes) - len(removed),
        removed=len(removed),
        peak=max(count for _, count in steps),
        mean_nodes=node_hours / hours if hours else float(steps[-1][1]),
        node_hours=node_hours,
        removals_per_hour=len(removed) / hours if hours else 0.0,
        removals_per_node_hour=len(removed) / node_hours if node_hours else 0.0,
        removal_instants=len(batches),
        largest_batch=max(batches, default=0),
        mean_lifetime=statistics.fmean(lifetimes) if lifetimes else None,
        median_lifetime=statistics.median(lifetimes) if lifetimes else None,
        zones=tuple(sorted({change.zone for change in trace.changes} - {""})),
        usd_per_hour=_mean_price(trace),
    )


def nodes_over_time(trace: Trace, zone: str | None = None) -> tuple[tuple[float, int], ...]:
    """Return (seconds, number of nodes from then on) for each change, ascending from 0, for one zone or all."""
    counts, count = {0.0: 0}, 0
    for change in trace.changes:
        if zone is None or change.zone == zone:
            count += 1 if change.change is Change.ADD else -1
            counts[change.at] = count
    return tuple(counts.items())


def removals_by_hour(trace: Trace) -> tuple[int, ...]:
    """Return the number of removals in each hour; the last hour may be incomplete."""
    hours = [0] * max(1, int(-(-trace.duration // HOUR)))
    for at in removal_times(trace):
        hours[min(int(at // HOUR), len(hours) - 1)] += 1
    return tuple(hours)


def _lifetimes(trace: Trace) -> list[float]:
    added: dict[str, float] = {}
    found = []
    for change in trace.changes:
        if change.change is Change.ADD:
            added[change.node] = change.at
        else:
            found.append(change.at - added.pop(change.node))
    return found


def _mean_price(trace: Trace) -> float | None:
    """Return the mean USD per node and hour, at the prices of the nodes' zones; None if a zone has no price."""
    cost = node_seconds = 0.0
    for zone in sorted({change.zone for change in trace.changes}):
        series = price_series(trace, zone)
        if not series:
            return None
        moments = sorted({at for at, _ in nodes_over_time(trace, zone)} | {price.at for price in series})
        counts, prices = dict(nodes_over_time(trace, zone)), {price.at: price.usd_per_hour for price in series}
        count, price = 0, series[0].usd_per_hour
        for at, after in pairwise([*moments, max(trace.duration, moments[-1])]):
            count, price = counts.get(at, count), prices.get(at, price)
            cost += count * price * (after - at)
            node_seconds += count * (after - at)
    return cost / node_seconds if node_seconds else None
