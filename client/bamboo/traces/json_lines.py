"""Our own form of a trace, JSON lines, which keeps everything that a trace knows. docs/traces.md describes it.

{"format": "bamboo-trace", "version": 1, "duration": 86400.0, "source": "..."}
{"at": 0.0, "add": "node1", "zone": "us-east-1a"}
{"at": 3600.0, "remove": "node1", "zone": "us-east-1a", "notice": 120.0}
{"at": 0.0, "price": 0.91, "zone": "us-east-1a", "onDemand": 3.06}
"""

from typing import TypeVar

import msgspec

from bamboo.traces.lines import numbered_lines
from bamboo.traces.trace import MOST_CHANGES, Change, NodeChange, NodeTraceError, PriceChange, Trace, make_trace

T = TypeVar("T")
FORMAT = "bamboo-trace"
VERSION = 1


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line."""

    format: str
    version: int
    duration: float = 0.0  # seconds
    source: str = ""


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every other line: one of add, remove and price."""

    at: float
    add: str | None = None
    remove: str | None = None
    price: float | None = None
    zone: str = ""
    notice: float | None = None
    on_demand: float | None = msgspec.field(default=None, name="onDemand")


_HEADER = msgspec.json.Decoder(TraceHeader, strict=True)
_ENTRY = msgspec.json.Decoder(Entry, strict=True)


def is_json_lines(text: str) -> bool:
    """Return whether the text has this form."""
    return next((one for one in text if not one.isspace()), "") == "{"


def parse_json_lines(path: str, text: str) -> Trace:
    """Return the recording in JSON lines. Raises NodeTraceError naming file and line."""
    lines = ((number, line) for number, line in numbered_lines(text) if line.strip())
    first, header_line = next(lines, (1, ""))
    header = _decoded(_HEADER, path, first, header_line)
    if header.format != FORMAT or header.version != VERSION:
        found = f"{header.format!r} version {header.version}"[:60]
        raise NodeTraceError(f"{path} line {first}: expected format {FORMAT!r} version {VERSION}; found {found}")
    changes: list[NodeChange] = []
    prices: list[PriceChange] = []
    before = 0.0
    for number, line in lines:
        if len(changes) + len(prices) == MOST_CHANGES:
            raise NodeTraceError(f"{path}: a trace has at most {MOST_CHANGES} changes, and this one has more")
        entry = _decoded(_ENTRY, path, number, line)
        if entry.at < before:
            raise NodeTraceError(f"{path} line {number}: the time goes back, from {before:g} to {entry.at:g}")
        before = entry.at
        one = _parsed(path, number, entry)
        if isinstance(one, NodeChange):
            changes.append(one)
        else:
            prices.append(one)
    try:
        return make_trace(changes, prices, duration=header.duration, source=header.source or path)
    except NodeTraceError as error:
        raise NodeTraceError(f"{path}: {error}") from None


def _parsed(path: str, number: int, entry: Entry) -> NodeChange | PriceChange:
    said = [name for name in ("add", "remove", "price") if getattr(entry, name) is not None]
    if len(said) != 1:
        found = " and ".join(said) or "none"
        raise NodeTraceError(f"{path} line {number}: expected one of add, remove and price, not {found}")
    if entry.notice is not None and said != ["remove"]:
        raise NodeTraceError(f"{path} line {number}: notice is of a removal, not of {said[0]}")
    if entry.on_demand is not None and said != ["price"]:
        raise NodeTraceError(f"{path} line {number}: onDemand is of a price, not of {said[0]}")
    if entry.price is not None:
        return PriceChange(at=entry.at, zone=entry.zone, usd_per_hour=entry.price, on_demand=entry.on_demand)
    change = Change.ADD if entry.add is not None else Change.REMOVE
    node = entry.add if entry.add is not None else entry.remove
    assert node is not None
    return NodeChange(
        at=entry.at,
        change=change,
        node=node,
        zone=entry.zone,
        notice=entry.notice,
    )


def _decoded(decoder: msgspec.json.Decoder[T], path: str, number: int, line: str) -> T:
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise NodeTraceError(f"{path} line {number}: {str(error) or 'nested too deeply'}") from None
