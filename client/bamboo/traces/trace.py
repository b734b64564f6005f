"""Traces of spot nodes: additions, removals and prices over time, checked when they are made. Times are seconds."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

MOST_CHANGES = 1_000_000
MOST_SECONDS = 1e9  # about 30 years
MOST_USD = 1_000_000  # per hour
MOST_NAME = 253  # characters, the limit of a Kubernetes node's name


class NodeTraceError(ValueError):
    """Error in reading, generating or checking a trace: a sentence, with the file and line if known."""


class Change(StrEnum):
    """The kind of change to a node: its addition or its removal."""

    ADD = "add"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChange:
    """The addition or the removal of a node."""

    at: float  # seconds since the trace began
    change: Change
    node: str
    zone: str = ""  # "" if it is not known
    # seconds between the notice and the removal; None if there was none, or if it is not known
    notice: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceChange:
    """A change of a zone's price for a spot node, from `at` on."""

    at: float
    zone: str  # a zone, the beginning of the names of several (a region), or "" for all
    usd_per_hour: float
    on_demand: float | None = None  # USD per hour of the same node on demand


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A trace of spot nodes; `make_trace` checks it, and sorts changes and prices by time."""

    duration: float  # seconds
    changes: tuple[NodeChange, ...] = ()
    prices: tuple[PriceChange, ...] = ()
    source: str = ""


def make_trace(
    changes: Iterable[NodeChange] = (), prices: Iterable[PriceChange] = (), *, duration: float = 0.0, source: str = ""
) -> Trace:
    """Return a checked trace that lasts at least until its last change or price. Changes at one time keep their order.

    Raises NodeTraceError for too many changes, bad values or names, nodes added while present or removed while absent.
    """
    ordered = tuple(sorted(changes, key=lambda change: change.at))
    priced = tuple(sorted(prices, key=lambda price: price.at))
    if len(ordered) + len(priced) > MOST_CHANGES:
        raise NodeTraceError(f"a trace has at most {MOST_CHANGES} changes, not {len(ordered) + len(priced)}")
    for problem in _problems(ordered, priced):
        raise NodeTraceError(problem)
    check_seconds(duration, "the duration")
    last = max([change.at for change in ordered[-1:]] + [price.at for price in priced[-1:]], default=0.0)
    return Trace(duration=max(duration, last), changes=ordered, prices=priced, source=source)


def check_seconds(seconds: float, what: str) -> None:
    """Raise NodeTraceError unless `seconds` is from 0 to MOST_SECONDS. what: names the value in the message."""
    if not (math.isfinite(seconds) and 0 <= seconds <= MOST_SECONDS):
        raise NodeTraceError(f"{what} must be a number from 0 to {MOST_SECONDS:.0f} seconds, not {seconds:g}")


def price_series(trace: Trace, zone: str) -> tuple[PriceChange, ...]:
    """Return a zone's prices: under its own name, else its longest prefix, else for all zones; () if there are none."""
    names = {price.zone for price in trace.prices if zone.startswith(price.zone)}
    name = max(names, key=len, default=None)
    return tuple(price for price in trace.prices if price.zone == name)


def unpriced(trace: Trace, *, all_nodes: bool = False) -> str:
    """Return a sentence that names a zone with nodes but no price; "" if all zones have prices, or the trace has none.

    all_nodes: return the sentence only if no node's zone has a price.
    """
    zones = dict.fromkeys(change.zone for change in trace.changes) if trace.prices else {}
    if all_nodes and any(price_series(trace, zone) for zone in zones):
        return ""
    for zone in zones:
        if not price_series(trace, zone):
            priced = ", ".join(dict.fromkeys(price.zone for price in trace.prices))[:100]
            nodes = f"nodes in zone {zone}" if zone else "nodes that say no zone"
            return (
                f"{trace.source or 'the trace'}: it has prices for {priced}, and none for {nodes};"
                " say their zone in the recording (docs/traces.md)"
            )
    return ""


def removal_times(trace: Trace) -> tuple[float, ...]:
    """Return the times of all removals in seconds, ascending."""
    return tuple(change.at for change in trace.changes if change.change is Change.REMOVE)


def _problems(changes: tuple[NodeChange, ...], prices: tuple[PriceChange, ...]) -> Iterator[str]:
    present: set[str] = set()
    for change in changes:
        check_seconds(change.at, "the time")
        if change.notice is not None:
            check_seconds(change.notice, "the notice")
        yield from _name_problems(change.node, "a node")
        yield from _name_problems(change.zone, "a zone")
        if not change.node:
            yield f"a node that is changed at {change.at:g} s has no name"
        added = change.change is Change.ADD
        if added is (change.node in present):
            wrong = "added, but it is there already" if added else "removed, but it is not there"
            yield f"node {change.node} is {wrong}, at {change.at:g} s"
        present ^= {change.node}
    for price in prices:
        check_seconds(price.at, "the time")
        for usd, what in ((price.usd_per_hour, "the price"), (price.on_demand, "the on-demand price")):
            if usd is not None and not 0 <= usd <= MOST_USD:
                yield f"{what} must be a number from 0 to {MOST_USD}, not {usd:g}"
        yield from _name_problems(price.zone, "a zone")


def _name_problems(name: str, what: str) -> Iterator[str]:
    if len(name) > MOST_NAME or not name.isprintable():
        yield f"the name of {what} must have at most {MOST_NAME} printable characters, not {name[:40]!r}"
