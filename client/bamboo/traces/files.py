"""Recordings of nodes in files: JSON lines, or a table of changes. The only I/O of this package."""

import gzip
import io
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

from bamboo.traces.json_lines import is_json_lines, parse_json_lines
from bamboo.traces.lines import numbered_lines
from bamboo.traces.trace import MOST_CHANGES, Change, NodeChange, NodeTraceError, Trace, checked, make_trace
from bamboo_core.complaints import system_reason

MOST_BYTES = 256 * 2**20  # of the text
GZIP = b"\x1f\x8b"  # how a compressed file begins
TABLE = "milliseconds,add|remove,node"


def parse_trace(path: str, text: str) -> Trace:
    """Return the recording in a text. Raises NodeTraceError naming file and line."""
    return parse_json_lines(path, text) if is_json_lines(text) else _parse_table(path, text)


def _parse_table(path: str, text: str) -> Trace:
    """Return the changes of a table. A node whose first line removes it was there from the beginning; lines with # are
    comments.
    """
    found: list[tuple[float, Change, str]] = []
    for number, line in numbered_lines(text):
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
    try:
        return make_trace([*before, *changes], source=path)
    except NodeTraceError as error:
        raise NodeTraceError(f"{path}: {error}") from None


def _change(path: str, number: int, cells: list[str]) -> tuple[float, Change, str]:
    """Return a line's seconds, its kind of change, and its node."""
    try:
        milliseconds, change, node = cells
        seconds = float(milliseconds) / 1000
        if not node or not math.isfinite(seconds):
            raise ValueError
        return checked(seconds, f"{path} line {number}: the time"), Change(change), node
    except NodeTraceError:
        raise
    except ValueError:
        found = ",".join(cells)[:60]
        raise NodeTraceError(
            f"{path} line {number}: expected {TABLE}, or JSON lines of bamboo-trace; found {found!r}"
        ) from None


def read_trace(path: str) -> Trace:
    """Read one recording. Raises NodeTraceError naming the file, and the line if there is one."""
    try:
        content = _content(path)
        if len(content) > MOST_BYTES:
            raise NodeTraceError(f"cannot read {path}: it has more than {MOST_BYTES // 2**20} MiB")
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise NodeTraceError(f"cannot read {path}: it is not UTF-8 text") from None
    return parse_trace(path, text)


def _content(path: str) -> bytes:
    """Return the unpacked content of a file, at most a byte more than allowed. Its first bytes show whether it is
    compressed. Raises NodeTraceError.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)  # at once, since a pipe is read but once
    except OSError as error:
        raise NodeTraceError(f"cannot read {path}: {system_reason(error)}") from None
    if not content.startswith(GZIP):
        return content
    try:
        return gzip.GzipFile(fileobj=io.BytesIO(content)).read(MOST_BYTES + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise NodeTraceError(f"cannot read {path}: its compressed content is damaged: {error}") from None


def read_traces(paths: Sequence[str]) -> Trace:
    """Read several files as one trace: nodes in one and prices in another, or one file for each zone.

    It lasts as long as the nodes were watched; prices may have been watched for longer.

    Raises NodeTraceError, also if two files name the same node.
    """
    traces = [read_trace(path) for path in paths]
    watched = max((trace.duration for trace in traces if trace.changes), default=0.0)
    duration = watched or max((trace.duration for trace in traces), default=0.0)
    try:
        return make_trace(
            (change for trace in traces for change in trace.changes),
            (price for trace in traces for price in trace.prices if price.at <= duration),
            duration=duration,
            source=", ".join(trace.source for trace in traces),
        )
    except NodeTraceError as error:
        together = f"{' and '.join(paths)} together: " if len(paths) > 1 else ""
        raise NodeTraceError(f"{together}{error}") from None


def read_nodes(paths: Sequence[str]) -> Trace:
    """Read a recording that must contain nodes. Raises NodeTraceError, also if the files have none, or none for any
    time.
    """
    trace = read_traces(paths)
    if not trace.changes:
        raise NodeTraceError(f"{paths[0]}: no node is in it; --trace needs a recording of nodes")
    if not trace.duration:
        raise NodeTraceError(
            f"{paths[0]}: no time passes in it, as all its nodes come at second 0; expected changes after that, or a "
            "duration in its first line"
        )
    return trace
