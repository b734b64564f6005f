"""Traces in files. The only I/O of this package."""

import zlib
from collections.abc import Sequence
from pathlib import Path

from bamboo.traces.tables import parse_table
from bamboo_core.complaints import system_reason
from bamboo_core.traces.json_lines import is_json_lines, parse_json_lines
from bamboo_core.traces.trace import NodeTraceError, Trace, make_trace

MOST_BYTES = 256 * 2**20  # of the text
GZIP = b"\x1f\x8b"  # how a stream begins
GZIP_STREAM = 31  # zlib's name for that form
CHUNK = 64 << 10  # bytes that are looked at once


def parse_trace(path: str, text: str, zone: str = "") -> Trace:
    """The recording that a text of any form that we read holds. zone: of nodes whose file names none. Raises
    NodeTraceError naming file and line.
    """
    return parse_json_lines(path, text) if is_json_lines(text) else parse_table(path, text, zone)


def read_trace(path: str, zone: str = "") -> Trace:
    """Raises NodeTraceError naming the file, and the line if there is one."""
    try:
        content = _content(path)
        if len(content) > MOST_BYTES:
            raise NodeTraceError(f"cannot read {path}: it has more than {MOST_BYTES // 2**20} MiB")
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise NodeTraceError(f"cannot read {path}: it is not UTF-8 text") from None
    return parse_trace(path, text, zone)


def _content(path: str) -> bytes:
    """The content of a file, unpacked, of at most a byte more than may be read. Compressed files are known by how they
    begin. Raises NodeTraceError.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)  # at once, since a pipe is read but once
    except OSError as error:
        raise NodeTraceError(f"cannot read {path}: {system_reason(error)}") from None
    try:
        return _unpacked(content) if content.startswith(GZIP) else content
    except ValueError as error:
        raise NodeTraceError(f"cannot read {path}: {error}") from None


def _unpacked(content: bytes) -> bytes:
    """The content as gzip's own tools have it: several streams are one text, and zeros between and behind them are
    nothing.

    ValueError for whatever else is there, with a sentence.
    """
    found, size, at = list[bytes](), 0, 0
    unpacker = zlib.decompressobj(wbits=GZIP_STREAM)
    while at < len(content) and size <= MOST_BYTES:
        if unpacker.eof:
            at += len(content[at : at + CHUNK]) - len(content[at : at + CHUNK].lstrip(b"\0"))
            if content[at : at + 1] in (b"", b"\0"):
                continue
            if not content.startswith(GZIP, at):
                raise ValueError(f"behind its compressed content are {len(content) - at} bytes that are none")
            unpacker = zlib.decompressobj(wbits=GZIP_STREAM)
        piece = content[at : at + CHUNK]
        try:
            text = unpacker.decompress(piece, MOST_BYTES + 1 - size)
        except zlib.error as error:
            raise ValueError(f"its compressed content is damaged: {error}") from None
        found.append(text)
        size += len(text)
        at += len(piece) - len(unpacker.unused_data)
    if not unpacker.eof and size <= MOST_BYTES:
        raise ValueError("its compressed content is cut off")
    return b"".join(found)


def read_traces(paths: Sequence[str], zone: str = "") -> Trace:
    """What several files say, as one trace: nodes in one and prices in another, or one file for each zone.

    It is as long as nodes were watched: prices that were watched for longer say nothing of what became of the nodes.

    Raises NodeTraceError, also if two of them have a node of one name.
    """
    traces = [read_trace(path, zone) for path in paths]
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
    """The recording of these files for who needs nodes. Also raises NodeTraceError if there are none, as in a file of
    prices, or none for any time.
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
