"""Recorded traces of spot nodes: text -> the times at which nodes were taken away. Two forms, told apart by line 1:

MILLISECONDS,add|remove,NODE        what happened, in milliseconds from the trace's start
YYYY-MM-DD,HH:MM:SS,COUNT           how many nodes there were; each one fewer was taken away
"""

import math
from collections.abc import Iterator
from datetime import datetime

Row = tuple[int, list[str]]
CHANGES = "milliseconds,add|remove,node"
COUNTS = "YYYY-MM-DD,HH:MM:SS,count"


def removals(path: str, text: str) -> tuple[float, ...]:
    """In seconds from the trace's start, ascending, one for each node. Raises ValueError naming file and line."""
    rows = list(_rows(text))
    found = _drops(path, rows) if rows and _is_date(rows[0][1]) else _removed(path, rows)
    if not found:
        raise ValueError(f"{path} contains no removal of a node")
    return tuple(sorted(found))


def _rows(text: str) -> Iterator[Row]:
    for number, line in enumerate(text.splitlines(), start=1):
        cells = [cell.strip() for cell in line.split(",")]
        if any(cells) and not cells[0].startswith("#"):
            yield number, cells


def _is_date(cells: list[str]) -> bool:
    return len(cells[0]) == 10 and cells[0].count("-") == 2


def _removed(path: str, rows: list[Row]) -> list[float]:
    found = []
    for number, cells in rows:
        if len(cells) != 3 or cells[1] not in ("add", "remove"):
            raise _wrong(path, number, CHANGES, cells)
        try:
            milliseconds = float(cells[0])
        except ValueError:
            raise _wrong(path, number, CHANGES, cells) from None
        if not (math.isfinite(milliseconds) and milliseconds >= 0):
            raise ValueError(f"{path} line {number}: the milliseconds must be a number from 0 up, not {cells[0]}")
        if cells[1] == "remove":
            found.append(milliseconds / 1000)
    return found


def _drops(path: str, rows: list[Row]) -> list[float]:
    """Some recorded stamps go back a little; the order of the lines is the order of what happened."""
    found: list[float] = []
    start, now, before = None, 0.0, 0
    for number, cells in rows:
        try:
            day, clock, digits = cells
            stamp = datetime.strptime(f"{day} {clock}", "%Y-%m-%d %H:%M:%S")
            count = int(digits)
        except ValueError:
            raise _wrong(path, number, COUNTS, cells) from None
        start = start or stamp
        now = max(now, (stamp - start).total_seconds())
        found += [now] * (before - count)
        before = count
    return found


def _wrong(path: str, number: int, expected: str, cells: list[str]) -> ValueError:
    return ValueError(f"{path} line {number}: expected {expected}; found {','.join(cells)[:60]!r}")
