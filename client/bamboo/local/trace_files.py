"""The way from the workers' trace files to one that Perfetto and chrome://tracing open."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path


def merge_traces(folder: Path, target: Path) -> None:
    """Writes all events of the folder's files, one a line. A killed worker's last line may be cut off: left out."""
    with target.open("w", encoding="utf-8") as merged:
        merged.write('{"displayTimeUnit": "ms", "traceEvents": [')
        separator = "\n"
        for path in sorted(folder.glob("*.json")):
            for event in _events(path):
                merged.write(separator + event)
                separator = ",\n"
        merged.write("\n]}\n")


def _events(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            text = line.strip().rstrip(",")
            with contextlib.suppress(ValueError):
                if isinstance(json.loads(text), dict):
                    yield text
