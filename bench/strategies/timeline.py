"""Timelines of the nodes that a job holds under a trace: when they are ready, when they are lost, their cost. Pure."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bamboo.traces.trace import Change, Trace, price_series

HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesChange:
    """The nodes that come and go at one moment."""

    at: float
    joined: tuple[str, ...] = ()  # ready now
    lost: tuple[str, ...] = ()  # were ready before


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The nodes of a job over time, in seconds."""

    duration: float
    changes: tuple[NodesChange, ...]
    node_seconds: float
    usd: float  # for all nodes that the job held
    removed: int  # nodes that were taken from the job, ready or not
    zones: Mapping[str, str] = field(default_factory=dict)  # by node; empty if all nodes are in one zone


def timeline(
    trace: Trace, *, capacity: int, start: float, usd_per_hour: float, duration: float | None = None
) -> Timeline:
    """Return the timeline of a job that holds at most `capacity` nodes, until `duration` seconds or the trace are over.

    The job replaces a lost node as soon as another one is free. It pays for each node that it holds, at the trace's
    price of the node's zone, else at usd_per_hour; a node is ready `start` seconds after the job takes it.
    """
    end = trace.duration if duration is None else min(duration, trace.duration)
    spans = _held(trace, capacity, end)
    joined: dict[float, list[str]] = {}
    lost: dict[float, list[str]] = {}
    usd = seconds = 0.0
    removed = 0
    for name, zone, begin, until, taken in spans:
        seconds += until - begin
        usd += _cost(trace, zone, begin, until, usd_per_hour)
        removed += taken
        if begin + start < until:
            joined.setdefault(begin + start, []).append(name)
            if taken:
                lost.setdefault(until, []).append(name)
    moments = sorted({*joined, *lost})
    changes = tuple(
        NodesChange(at=at, joined=tuple(joined.get(at, ())), lost=tuple(lost.get(at, ()))) for at in moments
    )
    zones = {name: zone for name, zone, *_ in spans}
    return Timeline(
        duration=end,
        changes=changes,
        node_seconds=seconds,
        usd=usd,
        removed=removed,
        zones=zones if len(set(zones.values())) > 1 else {},
    )


def steady(nodes: int, hours: float, usd_per_hour: float) -> Timeline:
    """Return a timeline of nodes that are never taken away, ready from the beginning."""
    names = tuple(f"node{number}" for number in range(1, nodes + 1))
    seconds = nodes * hours * HOUR
    return Timeline(
        duration=hours * HOUR,
        changes=(NodesChange(at=0.0, joined=names),),
        node_seconds=seconds,
        usd=seconds / HOUR * usd_per_hour,
        removed=0,
    )


Span = tuple[str, str, float, float, bool]  # name, zone, from, until, whether it was taken away then


def _held(trace: Trace, capacity: int, end: float) -> list[Span]:
    held: dict[str, tuple[str, float]] = {}
    spare: dict[str, str] = {}
    spans: list[Span] = []
    heap = [(change.at, place) for place, change in enumerate(trace.changes) if change.at < end]
    heapq.heapify(heap)
    while heap:
        at = heap[0][0]
        while heap and heap[0][0] == at:
            change = trace.changes[heapq.heappop(heap)[1]]
            if change.change is Change.ADD:
                spare[change.node] = change.zone
            elif change.node in held:
                zone, begin = held.pop(change.node)
                spans.append((change.node, zone, begin, at, True))
            else:
                spare.pop(change.node, None)
        while spare and len(held) < capacity:
            name = next(iter(spare))
            held[name] = (spare.pop(name), at)
    spans += [(name, zone, begin, end, False) for name, (zone, begin) in held.items()]
    return sorted(spans, key=lambda span: span[2])


def _cost(trace: Trace, zone: str, begin: float, until: float, usd_per_hour: float) -> float:
    prices = [(price.at, price.usd_per_hour) for price in price_series(trace, zone)] if trace.prices else []
    return _integral([(0.0, usd_per_hour), *prices], begin, until) / HOUR


def _integral(prices: Sequence[tuple[float, float]], begin: float, until: float) -> float:
    ends = [at for at, _ in prices[1:]] + [until]
    return sum(
        price * max(0.0, min(until, end) - max(begin, at)) for (at, price), end in zip(prices, ends, strict=True)
    )
