"""From the workers' trace files to one that Perfetto and chrome://tracing open."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def merge_traces(folder: Path, target: Path) -> None:
    """Writes all events of the folder's files. A killed worker's last line may be cut off: it is left out."""
    events = [event for path in sorted(folder.glob("*.json")) for event in _events(path)]
    target.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _events(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line.rstrip().rstrip(","))
            if isinstance(event, dict):
                yield event
