"""Trace files of spot nodes: JSON lines (docs/traces.md), or a table of changes. The only I/O of this package.

{"format": "bamboo-trace", "version": 1, "duration": 86400.0, "source": "..."}
{"at": 0.0, "add": "node1", "zone": "us-east-1a"}
{"at": 3600.0, "remove": "node1", "zone": "us-east-1a", "notice": 120.0}
{"at": 0.0, "price": 0.91, "zone": "us-east-1a", "onDemand": 3.06}
"""

import gzip
import io
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from bamboo.traces.trace import (
    MOST_CHANGES,
    Change,
    NodeChange,
    NodeTraceError,
    PriceChange,
    Trace,
    check_seconds,
    make_trace,
)
from bamboo_core.complaints import system_reason

MOST_BYTES = 256 * 2**20  # of the text
GZIP = b"\x1f\x8b"  # how a compressed file begins
TABLE = "milliseconds,add|remove,node"


def parse_trace(path: str, text: str) -> Trace:
    """Parse a trace file's text, JSON lines or a table. Raises NodeTraceError with the file, and the line if known."""
    is_json = next((one for one in text if not one.isspace()), "") == "{"
    changes, prices, header = _parse_json_lines(path, text) if is_json else (_parse_table(path, text), [], None)
    duration, source = (header.duration, header.source) if header is not None else (0.0, "")
    try:
        return make_trace(changes, prices, duration=duration, source=source or path)
    except NodeTraceError as error:
        raise NodeTraceError(f"{path}: {error}") from None


def _parse_table(path: str, text: str) -> list[NodeChange]:
    """Return a table's changes, sorted by time. Lines that begin with # are comments.

    A node whose first change is its removal is present from the beginning.
    """
    found: list[tuple[float, Change, str]] = []
    for number, line in _numbered_lines(text):
        cells = [cell.strip() for cell in line.split(",")]
        if not any(cells) or cells[0].startswith("#"):
            continue
        if len(found) == MOST_CHANGES:
            raise NodeTraceError(f"{path}: a trace has at most {MOST_CHANGES} changes, and this one has more")
        found.append(_change(path, number, cells))
    if not found:
        raise NodeTraceError(f"{path} line 1: expected {TABLE}, or JSON lines of bamboo-trace")
    found.sort(key=lambda one: one[0])
    known: set[str] = set()
    before: list[NodeChange] = []
    changes: list[NodeChange] = []
    for at, change, node in found:
        if node not in known and change is Change.REMOVE:
            before.append(NodeChange(at=0.0, change=Change.ADD, node=node))
        known.add(node)
        changes.append(NodeChange(at=at, change=change, node=node))
    return [*before, *changes]


def _change(path: str, number: int, cells: list[str]) -> tuple[float, Change, str]:
    """Parse the cells of a table's line into (seconds, kind of change, node). Raises NodeTraceError."""
    try:
        milliseconds, change, node = cells
        seconds = float(milliseconds) / 1000
        if not node or not math.isfinite(seconds):
            raise ValueError
        check_seconds(seconds, f"{path} line {number}: the time")
        return seconds, Change(change), node
    except NodeTraceError:
        raise
    except ValueError:
        found = ",".join(cells)[:60]
        raise NodeTraceError(
            f"{path} line {number}: expected {TABLE}, or JSON lines of bamboo-trace; found {found!r}"
        ) from None


def read_trace(path: str) -> Trace:
    """Read a trace from a file, gzipped or not. Raises NodeTraceError, which names the file, and the line if known."""
    try:
        content = _content(path)
        if len(content) > MOST_BYTES:
            raise NodeTraceError(f"cannot read {path}: it has more than {MOST_BYTES // 2**20} MiB")
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise NodeTraceError(f"cannot read {path}: it is not UTF-8 text") from None
    return parse_trace(path, text)


def _content(path: str) -> bytes:
    """Return at most MOST_BYTES + 1 bytes of a file, decompressed if it is gzip. Raises NodeTraceError."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)  # at once, since a pipe can be read only once
    except OSError as error:
        raise NodeTraceError(f"cannot read {path}: {system_reason(error)}") from None
    if not content.startswith(GZIP):
        return content
    try:
        return gzip.GzipFile(fileobj=io.BytesIO(content)).read(MOST_BYTES + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise NodeTraceError(f"cannot read {path}: its compressed content is damaged: {error}") from None


def read_nodes(paths: Sequence[str]) -> Trace:
    """Read several files as one trace: nodes in one and prices in another, or one file for each zone.

    The trace is as long as the longest recording with nodes, or, if these have no duration, as the longest recording.
    Later prices are dropped.

    Raises NodeTraceError if a file is invalid, a node is in two files at once, or the trace has no nodes or duration.
    """
    traces = [read_trace(path) for path in paths]
    watched = max((trace.duration for trace in traces if trace.changes), default=0.0)
    duration = watched or max((trace.duration for trace in traces), default=0.0)
    try:
        found = make_trace(
            (change for trace in traces for change in trace.changes),
            (price for trace in traces for price in trace.prices if price.at <= duration),
            duration=duration,
            source=", ".join(trace.source for trace in traces),
        )
    except NodeTraceError as error:
        together = f"{' and '.join(paths)} together: " if len(paths) > 1 else ""
        raise NodeTraceError(f"{together}{error}") from None
    if not found.changes:
        raise NodeTraceError(f"{paths[0]}: no node is in it; --trace needs a recording of nodes")
    if not found.duration:
        raise NodeTraceError(
            f"{paths[0]}: no time passes in it, as all its nodes come at second 0; expected changes after that, or a "
            "duration in its first line"
        )
    return found


T = TypeVar("T")
FORMAT = "bamboo-trace"
VERSION = 1


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of a trace in JSON lines."""

    format: str
    version: int
    duration: float = 0.0  # seconds
    source: str = ""


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change in a trace in JSON lines: any line after the header. Exactly one of add, remove and price is set."""

    at: float
    add: str | None = None
    remove: str | None = None
    price: float | None = None
    zone: str = ""
    notice: float | None = None
    on_demand: float | None = msgspec.field(default=None, name="onDemand")


_HEADER = msgspec.json.Decoder(TraceHeader, strict=True)
_ENTRY = msgspec.json.Decoder(Entry, strict=True)


def _parse_json_lines(path: str, text: str) -> tuple[list[NodeChange], list[PriceChange], TraceHeader]:
    lines = ((number, line) for number, line in _numbered_lines(text) if line.strip())
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
    return changes, prices, header


def _parsed(path: str, number: int, entry: Entry) -> NodeChange | PriceChange:
    kinds = [name for name in ("add", "remove", "price") if getattr(entry, name) is not None]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "none"
        raise NodeTraceError(f"{path} line {number}: expected one of add, remove and price, not {found}")
    if entry.notice is not None and kinds != ["remove"]:
        raise NodeTraceError(f"{path} line {number}: notice is of a removal, not of {kinds[0]}")
    if entry.on_demand is not None and kinds != ["price"]:
        raise NodeTraceError(f"{path} line {number}: onDemand is of a price, not of {kinds[0]}")
    if entry.price is not None:
        return PriceChange(at=entry.at, zone=entry.zone, usd_per_hour=entry.price, on_demand=entry.on_demand)
    change = Change.ADD if entry.add is not None else Change.REMOVE
    node = entry.add if entry.add is not None else entry.remove
    assert node is not None
    return NodeChange(at=entry.at, change=change, node=node, zone=entry.zone, notice=entry.notice)


def _decoded(decoder: msgspec.json.Decoder[T], path: str, number: int, line: str) -> T:
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise NodeTraceError(f"{path} line {number}: {str(error) or 'nested too deeply'}") from None


def _numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its line ending). Lines end with LF, CR LF or CR."""
    return enumerate((line.rstrip("\n") for line in io.StringIO(text, newline=None)), start=1)
