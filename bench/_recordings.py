"""A reader of published recordings of spot nodes: CSV files in Bamboo's formats, or tables of node counts.

YYYY-MM-DD,HH:MM:SS,COUNT                the number of nodes
seconds,nodes / SECONDS,COUNT            the same, below a header
seconds,ZONE,ZONE... / SECONDS,COUNT...  the number in each zone, below a header

In tables, the oldest node is assumed to leave first.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from bamboo.traces.files import read_trace
from bamboo.traces.trace import Change, NodeChange, NodeTraceError, Trace, make_trace


def recordings(folder: Path) -> Iterator[tuple[str, Trace]]:
    """Yield the name and trace of each *.csv recording in a folder, by name. Skips other tables, such as prices."""
    for path in sorted(folder.glob("*.csv")):
        rows = [[cell.strip() for cell in line.split(",")] for line in path.read_text().splitlines() if line.strip()]
        first = rows[0][0]
        try:
            if first == "seconds":
                yield path.stem, counted(rows)
            elif first.count("-") == 2 and len(first) == len("YYYY-MM-DD"):
                yield path.stem, dated(rows)
            else:
                yield path.stem, read_trace(str(path))
        except NodeTraceError:
            continue


@dataclass(slots=True)
class Counter:
    """A converter from a zone's node counts to single nodes that come and go. The oldest node leaves first."""

    zone: str
    changes: list[NodeChange] = field(default_factory=list)
    there: deque[str] = field(default_factory=deque)
    named: int = 0

    def becomes(self, count: int, at: float) -> None:
        while len(self.there) > count:
            self._add(at, Change.REMOVE, self.there.popleft())
        while len(self.there) < count:
            self.named += 1
            self.there.append(f"{self.zone}-{self.named}" if self.zone else f"node{self.named}")
            self._add(at, Change.ADD, self.there[-1])

    def _add(self, at: float, change: Change, node: str) -> None:
        self.changes.append(NodeChange(at=at, change=change, node=node, zone=self.zone))


def dated(rows: list[list[str]]) -> Trace:
    """Read a recording with dates. A time before that of an earlier row counts as the latest time so far."""
    counter, now = Counter(""), 0.0
    stamps = [datetime.strptime(f"{day} {clock}", "%Y-%m-%d %H:%M:%S") for day, clock, _ in rows]
    for stamp, row in zip(stamps, rows, strict=True):
        now = max(now, (stamp - stamps[0]).total_seconds())
        counter.becomes(int(row[2]), now)
    return make_trace(counter.changes, duration=now)


def counted(rows: list[list[str]]) -> Trace:
    """Read a recording of seconds and counts. rows: begin with the header, which has "nodes" or zones."""
    header, *counts = rows
    counters = [Counter("" if name == "nodes" else name) for name in header[1:]]
    for row in counts:
        for counter, count in zip(counters, row[1:], strict=True):
            counter.becomes(int(count), float(row[0]))
    return make_trace([change for one in counters for change in one.changes], duration=float(rows[-1][0]))
