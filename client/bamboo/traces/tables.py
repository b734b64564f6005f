"""Published recordings of spot nodes, tables in text -> a trace. The form is told from the first lines.

MILLISECONDS,add|remove,NODE             what happened to each node
YYYY-MM-DD,HH:MM:SS,COUNT                how many nodes there were
seconds,nodes / SECONDS,COUNT            the same
seconds,ZONE,ZONE... / SECONDS,COUNT...  the same in each zone
zone,tick,usd_per_hour / ZONE,TICK,USD   prices when they changed, in ticks of TICK_SECONDS
region,machine_type,spot_usd_per_hour,on_demand_usd_per_hour,fetched    prices of one day

Where only a number of nodes is known, the node that has been there longest is taken to be the one that went.
"""

import csv
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain

from bamboo_core.traces.lines import numbered_lines
from bamboo_core.traces.trace import (
    MOST_CHANGES,
    Change,
    NodeChange,
    NodeTraceError,
    PriceChange,
    Trace,
    checked,
    checked_price,
    make_trace,
)

TICK_SECONDS = 195.0
MOST_NODES = 100_000
CHANGES = "milliseconds,add|remove,node"
COUNTS = "YYYY-MM-DD,HH:MM:SS,count"
PRICES = ["zone", "tick", "usd_per_hour"]
PRICE_LIST = ["region", "machine_type", "spot_usd_per_hour", "on_demand_usd_per_hour", "fetched"]
Row = tuple[int, list[str]]


def parse_table(path: str, text: str, zone: str = "") -> Trace:
    """The recording in a table. zone: of nodes whose table names none. Raises NodeTraceError naming file and line."""
    rows = _rows(text)
    first = next(rows, None)
    read = _reader(first[1]) if first else None
    if first is None or read is None:
        number, cells = first or (1, [])
        found = f"; found {','.join(cells)[:60]!r}" if first else ""
        raise NodeTraceError(f"{path} line {number}: expected {CHANGES} or another form of a trace{found}")
    try:
        return read(path, chain([first], rows), zone)
    except NodeTraceError as error:
        raise error if str(error).startswith(path) else NodeTraceError(f"{path}: {error}") from None


def _rows(text: str) -> Iterator[Row]:
    for number, line in numbered_lines(text):
        cells = [cell.strip() for cell in _cells(line)]
        if any(cells) and not cells[0].startswith("#"):
            yield number, cells


def _cells(line: str) -> list[str]:
    """Spreadsheets write cells in quotes."""
    if '"' in line:
        with suppress(csv.Error):  # a cell that is too long: what it is can be told from the text as it stands
            return next(csv.reader([line], skipinitialspace=True), [])
    return line.split(",")


def _reader(first: list[str]) -> Callable[[str, Iterator[Row], str], Trace] | None:
    if len(first[0]) == 10 and first[0].count("-") == 2:
        return _dated
    if first == PRICES:
        return _price_changes
    if first == PRICE_LIST:
        return _price_list
    if first[0] == "seconds" and len(first) > 1:
        return _counted
    if len(first) == 1 or (first[0].lstrip("+-.").isalpha() and first[0] not in ("nan", "inf", "-inf", "-nan")):
        return None
    return _changes


@dataclass(slots=True)
class _Counter:
    """Numbers of nodes in a zone -> changes. The node that has been there longest goes first."""

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
        _check_count(len(self.changes))
        self.changes.append(NodeChange(at=at, change=change, node=node, zone=self.zone))


def _check_count(so_far: int) -> None:
    """Raises NodeTraceError if there may not be one change more: files may have many times as many as a trace."""
    if so_far == MOST_CHANGES:
        raise NodeTraceError(f"a trace has at most {MOST_CHANGES} changes, and this one has more")


def _changes(path: str, rows: Iterator[Row], zone: str) -> Trace:
    """A node that is first named when it is removed was there from the beginning."""
    found: list[tuple[float, Change, str]] = []
    for number, cells in rows:
        if len(cells) != 3 or cells[1] not in ("add", "remove") or not cells[2]:
            raise _wrong(path, number, CHANGES, cells)
        try:
            milliseconds = float(cells[0])
        except ValueError:
            raise _wrong(path, number, CHANGES, cells) from None
        if not (math.isfinite(milliseconds) and milliseconds >= 0):
            raise NodeTraceError(f"{path} line {number}: the milliseconds must be a number from 0 up, not {cells[0]}")
        checked(milliseconds / 1000, f"{path} line {number}: the time")
        _check_count(len(found))
        found.append((milliseconds / 1000, Change(cells[1]), cells[2]))
    found.sort(key=lambda one: one[0])
    known: set[str] = set()
    before: list[NodeChange] = []
    changes: list[NodeChange] = []
    for at, change, node in found:
        if node not in known and change is Change.REMOVE:
            before.append(NodeChange(at=0.0, change=Change.ADD, node=node, zone=zone))
        known.add(node)
        changes.append(NodeChange(at=at, change=change, node=node, zone=zone))
    return make_trace([*before, *changes], source=path)


def _dated(path: str, rows: Iterator[Row], zone: str) -> Trace:
    """Some recorded stamps go back a little; the order of the lines is the order of what happened."""
    counter = _Counter(zone)
    start, now = None, 0.0
    for number, cells in rows:
        try:
            day, clock, digits = cells
            stamp = datetime.strptime(f"{day} {clock}", "%Y-%m-%d %H:%M:%S")
        except ValueError:
            raise _wrong(path, number, COUNTS, cells) from None
        start = start or stamp
        now = max(now, (stamp - start).total_seconds())
        counter.becomes(_count(path, number, digits), now)
    return make_trace(counter.changes, duration=now, source=path)


def _counted(path: str, rows: Iterator[Row], zone: str) -> Trace:
    first, header = next(rows)
    names = [zone] if header[1:] == ["nodes"] else header[1:]
    if len(set(names)) != len(names) or (header[1:] != ["nodes"] and not all(names)):
        raise NodeTraceError(f"{path} line {first}: expected the name of a zone, each once, above every column")
    counters = [_Counter(name) for name in names]
    now = 0.0
    for number, cells in rows:
        if len(cells) != len(header):
            raise _wrong(path, number, ",".join(header)[:60], cells)
        now = _time(path, number, cells[0], now)
        for counter, digits in zip(counters, cells[1:], strict=True):
            counter.becomes(_count(path, number, digits), now)
    return make_trace([change for one in counters for change in one.changes], duration=now, source=path)


def _price_changes(path: str, rows: Iterator[Row], zone: str) -> Trace:
    found: list[PriceChange] = []
    next(rows)
    for number, cells in rows:
        if len(cells) != 3 or not cells[0]:
            raise _wrong(path, number, ",".join(PRICES), cells)
        _check_count(len(found))
        at = checked(_number(path, number, cells[1], "the tick") * TICK_SECONDS, f"{path} line {number}: the time")
        found.append(PriceChange(at=at, zone=cells[0], usd_per_hour=_price(path, number, cells[2])))
    return make_trace(prices=found, source=path)


def _price_list(path: str, rows: Iterator[Row], zone: str) -> Trace:
    found: dict[str, PriceChange] = {}
    next(rows)
    for number, cells in rows:
        if len(cells) != len(PRICE_LIST) or not cells[0]:
            raise _wrong(path, number, ",".join(PRICE_LIST), cells)
        if cells[0] in found:
            raise NodeTraceError(f"{path} line {number}: {cells[0]} has a price already; keep one machine type")
        spot, on_demand = _price(path, number, cells[2]), _price(path, number, cells[3])
        found[cells[0]] = PriceChange(at=0.0, zone=cells[0], usd_per_hour=spot, on_demand=on_demand)
    return make_trace(prices=found.values(), source=path)


def _number(path: str, number: int, text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise NodeTraceError(f"{path} line {number}: {what} must be a number from 0 up, not {text[:40]!r}")
    return value


def _time(path: str, number: int, text: str, before: float) -> float:
    now = checked(_number(path, number, text, "the seconds"), f"{path} line {number}: the time")
    if now < before:
        raise NodeTraceError(f"{path} line {number}: the seconds go back, from {before:g} to {now:g}")
    return now


def _price(path: str, number: int, text: str) -> float:
    return checked_price(_number(path, number, text, "the price"), f"{path} line {number}: the price")


def _count(path: str, number: int, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) <= MOST_NODES):
        raise NodeTraceError(f"{path} line {number}: the count must be from 0 to {MOST_NODES}, not {text[:40]!r}")
    return int(text)


def _wrong(path: str, number: int, expected: str, cells: list[str]) -> NodeTraceError:
    return NodeTraceError(f"{path} line {number}: expected {expected}; found {','.join(cells)[:60]!r}")
