"""Merging of workers' trace files into one file in Chrome's trace event format, for Perfetto and chrome://tracing."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from bamboo_core.storage.local_files import whole_file


def merge_traces(folder: Path, target: Path) -> None:
    """Merge the events of a folder's .json files into `target`. A killed worker's incomplete last line is left out.

    Raises OSError.
    """
    with whole_file(target) as merged:
        merged.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
        separator = "\n"
        for path in sorted(folder.glob("*.json")):
            for event in _events(path):
                merged.write((separator + event).encode())
                separator = ",\n"
        merged.write(b"\n]}\n")


def _events(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            text = line.strip().rstrip(",")
            with contextlib.suppress(ValueError):
                if isinstance(json.loads(text), dict):
                    yield text
