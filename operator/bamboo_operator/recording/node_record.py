"""Which nodes ran workers, when they came and went, and what they cost: a trace that grows, and stays bounded. Pure.

Level-triggered: what is recorded follows from which nodes there are now and which ones the record says are there, so
that an operator that was away goes on with the record of the one before it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

from bamboo_core.traces.compressed import compressed, text_of
from bamboo_core.traces.json_lines import parse_json_lines
from bamboo_core.traces.trace import Change, NodeChange, PriceChange, Trace
from bamboo_operator.signals.node_marks import NodeMark
from bamboo_operator.signals.signals import node_signal

MOST_CHANGES: Final = 20_000  # some 1.6 MB of text, 200 KB compressed
MOST_BYTES: Final = 500_000  # compressed; the API server takes a ConfigMap of 1 MiB, in which they are in base64
DROPPED: Final = 1 / 4  # of what is recorded, if that is too much: the oldest


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNode:
    """A node that there is, and on which a worker runs or ran."""

    uid: str
    zone: str = ""
    pool: str = ""
    # price, on_demand: USD an hour of its pool, if known
    price: float | None = None
    on_demand: float | None = None
    used: bool = True  # a worker is on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What is wrong with a node: since when (seconds since 1970) it has had a notice, and since when it has not been
    heard of. used: a worker was on it when that began.
    """

    uid: str
    noticed: float | None = None
    silent: float | None = None
    used: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A record of the nodes that ran workers."""

    began: float  # seconds since 1970, when the trace begins
    trace: Trace = field(default_factory=lambda: Trace(duration=0.0))
    there: Mapping[str, str] = field(default_factory=dict)  # uids of the nodes that are there; "" if not known

    @property
    def newest(self) -> float:
        """The seconds since 1970 of the newest change; times never go back."""
        return self.began + max((change.at for change in self.trace.changes[-1:]), default=0.0)


def observed(
    record: NodeRecord,
    seen: Mapping[str, SeenNode],
    troubles: Mapping[str, Trouble],
    now: float,
    before: Mapping[str, SeenNode] = MappingProxyType({}),
) -> NodeRecord:
    """The record with what has changed. seen: all nodes to be recorded that there are; before: at the last look, if it
    was this process's. troubles: of the others, too.

    A node that was not heard of before it was deleted went when it fell silent. It was idle if no worker was on it any
    more before its trouble began.
    """
    changes: list[NodeChange] = []
    for name, uid in record.there.items():
        if name not in seen or (uid and seen[name].uid != uid):
            changes.append(_removal(record, name, troubles.get(name), now, before.get(name)))
    changes.sort(key=lambda change: change.at)
    gone = {change.node for change in changes}
    at = _at(record, now)
    new = {name: node for name, node in seen.items() if name not in record.there or name in gone}
    changes += [
        NodeChange(at=at, change=Change.ADD, node=name, zone=node.zone, pool=node.pool) for name, node in new.items()
    ]
    dearer = {name: node for name, node in seen.items() if name in before and before[name].price != node.price}
    prices = tuple(_new_prices(record.trace, new | dearer, at))
    there = {name: seen[name].uid for name in (*record.there, *new) if name in seen}
    if not changes and not prices and there == record.there:
        return record
    trace = replace(
        record.trace,
        changes=(*record.trace.changes, *changes),
        prices=(*record.trace.prices, *prices),
        duration=max(record.trace.duration, at),
    )
    return replace(record, trace=trace, there=there)


def troubles_of(
    before: Mapping[str, Trouble],
    nodes: Mapping[str, Mapping[str, Any]],
    marks: Sequence[NodeMark],
    now: datetime,
    used: Collection[str] | None = None,
) -> dict[str, Trouble]:
    """The troubles of nodes that are, or were until now, announced to go, or not ready. before: what was known a moment
    ago, which is kept for nodes that are gone by now. used: the nodes with a worker; None if that is not known.
    """
    found = {name: trouble for name, trouble in before.items() if name not in nodes}
    for name, node in nodes.items():
        uid = str(node["metadata"].get("uid", ""))
        known = before.get(name)
        if known is None or known.uid != uid:
            known = Trouble(uid=uid, used=used is None or name in used)
        noticed = known.noticed or now.timestamp() if node_signal(node, now, marks) else None
        silent = None if _is_ready(node) else known.silent or now.timestamp()
        if noticed is not None or silent is not None:
            found[name] = replace(known, noticed=noticed, silent=silent)
    return found


def bounded(record: NodeRecord, most: int = MOST_CHANGES) -> NodeRecord:
    """The record with at most so many changes and prices: it begins later, with the nodes and prices of that time. It
    has more only if there are so many nodes at once.
    """
    while _size(record) > most:
        shorter = without_oldest(record)
        if _size(shorter) >= _size(record):
            return shorter
        record = shorter
    return record


def without_oldest(record: NodeRecord) -> NodeRecord:
    """The record without its oldest changes; the same record if nothing has happened since it began."""
    trace = record.trace
    moments = [change.at for change in trace.changes] + [price.at for price in trace.prices]
    times = sorted(at for at in moments if at > 0)
    if not times:
        return record
    cut = times[int(len(times) * DROPPED)]
    there: dict[str, NodeChange] = {}
    for change in trace.changes:
        if change.at > cut:
            break
        there.pop(change.node, None)
        if change.change is Change.ADD:
            there[change.node] = replace(change, at=0.0)
    known = {price.zone: replace(price, at=0.0) for price in trace.prices if price.at <= cut}
    later = tuple(replace(change, at=round(change.at - cut, 1)) for change in trace.changes if change.at > cut)
    priced = tuple(replace(price, at=round(price.at - cut, 1)) for price in trace.prices if price.at > cut)
    shorter = replace(
        trace, changes=(*there.values(), *later), prices=(*known.values(), *priced), duration=trace.duration - cut
    )
    return replace(record, began=record.began + cut, trace=shorter)


def stored(record: NodeRecord, now: float, source: str) -> tuple[NodeRecord, bytes]:
    """The record as it is kept until it is read again, compressed; and what is left of it, if it was too long."""
    while True:
        duration = max(record.trace.duration, now - record.began, 0.0)
        whole = replace(record.trace, source=source, duration=round(duration, 1))
        data = compressed(whole)
        shorter = without_oldest(record)
        if len(data) <= MOST_BYTES or _size(shorter) >= _size(record):
            return record, data
        record = shorter


def restored(data: bytes, began: float) -> NodeRecord:
    """What was stored. Raises NodeTraceError."""
    trace = parse_json_lines("the record", text_of(data))
    there: dict[str, str] = {}
    for change in trace.changes:
        if change.change is Change.ADD:
            there[change.node] = ""
        else:
            there.pop(change.node, None)
    return NodeRecord(began=began, trace=trace, there=there)


def _size(record: NodeRecord) -> int:
    return len(record.trace.changes) + len(record.trace.prices)


def _is_ready(node: Mapping[str, Any]) -> bool:
    """Whether a node is ready; one of which nobody says it counts as ready."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return all(condition.get("status") == "True" for condition in conditions if condition.get("type") == "Ready")


def _removal(record: NodeRecord, name: str, trouble: Trouble | None, now: float, seen: SeenNode | None) -> NodeChange:
    """The end of a node. seen: as it was at the last look, if anybody looked."""
    if trouble is not None and record.there[name] not in ("", trouble.uid):
        trouble = None  # of a newer node of that name
    when = now if trouble is None or trouble.silent is None else trouble.silent
    at = _at(record, max(when, record.newest))
    before = next(c for c in reversed(record.trace.changes) if c.node == name and c.change is Change.ADD)
    noticed = trouble.noticed if trouble else None
    notice = None if noticed is None else max(0.0, round(at - (noticed - record.began), 1))
    used = trouble.used if trouble is not None else seen is None or seen.used
    return NodeChange(
        at=at, change=Change.REMOVE, node=name, zone=before.zone, pool=before.pool, notice=notice, idle=not used
    )


def _new_prices(trace: Trace, new: Mapping[str, SeenNode], at: float) -> Iterator[PriceChange]:
    """The prices in the zones of nodes that are new, or cost something else now, if they are others than the
    last ones.
    """
    last = {price.zone: (price.usd_per_hour, price.on_demand) for price in trace.prices}
    for node in new.values():
        if node.price is not None and last.get(node.zone) != (node.price, node.on_demand):
            last[node.zone] = node.price, node.on_demand
            yield PriceChange(at=at, zone=node.zone, usd_per_hour=node.price, on_demand=node.on_demand)


def _at(record: NodeRecord, when: float) -> float:
    """Seconds since the trace began, not before its newest change."""
    return max(round(when - record.began, 1), round(record.newest - record.began, 1))
