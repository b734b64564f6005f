"""A window of a trace, which wraps around from the trace's end to its beginning. Pure."""

from bisect import bisect_left
from dataclasses import replace

from bamboo.traces.trace import Change, NodeChange, PriceChange, Trace, make_trace

MOST_ROUNDS = 1000


def window(trace: Trace, start: float, seconds: float) -> Trace:
    """Return `seconds` seconds of a trace, from `start` on; the window begins with the nodes present at `start`.

    The trace repeats after its end (node changes at most MOST_ROUNDS times). An empty trace gives an empty window.
    """
    if not trace.changes or trace.duration <= 0:
        return make_trace(duration=seconds, source=trace.source)
    present: dict[str, str] = {}
    for change in trace.changes[: bisect_left(trace.changes, start, key=lambda change: change.at)]:
        _follow(present, change)
    changes = [NodeChange(at=0.0, change=Change.ADD, node=node, zone=zone) for node, zone in present.items()]
    begun = -start
    for _ in range(MOST_ROUNDS):
        for change in trace.changes:
            at = begun + change.at
            if at > seconds:
                break
            if at < 0 or (change.change is Change.ADD) == (change.node in present):
                continue  # before the window; or the node stayed from the trace's end to its beginning
            _follow(present, change)
            notice = None if change.notice is None else min(change.notice, at)
            changes.append(replace(change, at=at, notice=notice))
        begun += trace.duration
        if begun >= seconds:
            break
        stay = {c.node for c in trace.changes if c.at == 0 and c.change is Change.ADD}
        for node in [node for node in present if node not in stay]:
            changes.append(NodeChange(at=begun, change=Change.REMOVE, node=node, zone=present.pop(node)))
    return make_trace(changes, _prices(trace, start, seconds), duration=seconds, source=trace.source)


def _follow(present: dict[str, str], change: NodeChange) -> None:
    if change.change is Change.ADD:
        present[change.node] = change.zone
    else:
        present.pop(change.node, None)


def _prices(trace: Trace, start: float, seconds: float) -> list[PriceChange]:
    """Return the window's prices: each zone's price at `start`, or else its first, at second 0, then the later ones."""
    found: list[PriceChange] = []
    latest: dict[str, PriceChange] = {}
    for price in trace.prices:
        if price.at <= start or price.zone not in latest:
            latest[price.zone] = price
    found += [replace(price, at=0.0) for price in latest.values()]
    begun = -start
    while begun < seconds and trace.duration > 0:
        found += [replace(p, at=begun + p.at) for p in trace.prices if 0 < begun + p.at <= seconds]
        begun += trace.duration
    return found
