"""A trace as the operator keeps it in a ConfigMap: our own form, compressed. Pure."""

import gzip
import zlib
from typing import Final

from bamboo_core.traces.json_lines import to_json_lines
from bamboo_core.traces.trace import NodeTraceError, Trace

MOST_TEXT: Final = 64 * 2**20  # bytes


def compressed(trace: Trace) -> bytes:
    """Equal traces give equal bytes."""
    return gzip.compress("".join(to_json_lines(trace)).encode(), mtime=0)


def text_of(data: bytes) -> str:
    """The trace's lines. Raises NodeTraceError if these are no such data, or too many."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        text = unpacker.decompress(data, MOST_TEXT)
        if not unpacker.eof:
            raise NodeTraceError("the record of nodes is cut off, or too long")
        return text.decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise NodeTraceError(f"the record of nodes cannot be read: {error}") from None
