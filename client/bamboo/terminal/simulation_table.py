"""Simulated runs as a table and as JSON. Pure."""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from bamboo.simulation.figures import Spread
from bamboo.simulation.job.job_record import Series, mean_over_time

HEADS = {
    "preemptions": "PREEMPTIONS",
    "takeovers": "TAKEOVERS",
    "restores": "RESTORES",
    "fatal": "FATAL",
    "pause": "PAUSE S",
    "waited": "WAITED H",
    "nodes": "NODES",
    "throughput": "SAMPLES/S",
    "usd_per_hour": "USD/H",
    "usd": "USD",
    "zone_gb_per_hour": "ZONE GB/H",
    "zone_usd_per_hour": "ZONE USD/H",
    "value": "VALUE",
    "goodput": "GOODPUT",
    "redone": "REDONE",
    "hours": "HOURS",
    "steps": "STEPS",
}
DIGITS = {
    "preemptions": 2,
    "takeovers": 2,
    "restores": 2,
    "fatal": 3,
    "pause": 2,
    "nodes": 2,
    "throughput": 2,
    "usd_per_hour": 2,
    "usd": 2,
    "zone_gb_per_hour": 1,
    "zone_usd_per_hour": 2,
    "steps": 0,
}
UNKNOWN = "–"
GAP = 2  # columns between two columns of a table
Case = tuple[str, Spread]


def simulation_table(cases: Sequence[Case], width: int | None = None) -> Group:
    """Return a table of the means of each case, with standard deviations if it has several runs.

    cases: at least one. width: columns of the terminal; None: unlimited. The table leaves out traffic between zones if
    there is none.
    """
    crosses = any(found.mean.get("zone_gb_per_hour") for _, found in cases)
    known = [f for f in HEADS if f in cases[0][1].mean and (crosses or not f.startswith("zone_"))]
    heads = ("CASE", "RUNS", *(HEADS[figure] for figure in known))
    return fitted(heads, [(name, str(found.runs), *(_cell(found, f) for f in known)) for name, found in cases], width)


def fitted(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, left: Collection[str] = ()) -> Group:
    """Return a table of the rows; if that is too wide, with one column per row; if that is too wide as well, several
    tables.

    Each part begins with the first column, which names the row. left: heads of columns of words.
    """
    columns = [[head, *(row[i] for row in rows)] for i, head in enumerate(heads)]
    words = {heads[0], *left}
    if width is None or _wide(columns) <= width:
        return Group(_table(columns, words))
    turned = [list(heads), *([*row] for row in rows)]
    if _wide(turned) <= width:
        return Group(_table(turned, {heads[0]}))
    parts: list[list[list[str]]] = []
    for column in columns[1:]:
        if parts and _wide([*parts[-1], column]) <= width:
            parts[-1].append(column)
        else:
            parts.append([columns[0], column])
    tables = [_table(part, words) for part in parts]
    return Group(*(part for table in tables for part in (table, "")[: 1 if table is tables[-1] else 2]))


def _wide(columns: Sequence[Sequence[str]]) -> int:
    return sum(max(map(cell_len, column)) for column in columns) + GAP * (len(columns) - 1)


def _table(columns: Sequence[Sequence[str]], left: Collection[str]) -> Table:
    """Return a table with these columns. left: heads of left-aligned columns; numbers are right-aligned."""
    shown = Table(box=None, show_edge=False, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        justify: Literal["left", "right"] = "left" if column[0] in left else "right"
        shown.add_column(Text(column[0]), justify=justify, no_wrap=number > 0, overflow="fold")
    for row in zip(*(column[1:] for column in columns), strict=True):
        shown.add_row(*map(Text, row))
    return shown


def simulation_documents(cases: Sequence[Case], over_time: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cases as JSON values: means, deviations, and the share of runs with a fatal preemption.

    over_time: one document of `over_time_document` for each case.
    """
    return [
        _finite({"case": name, **asdict(found), "overTime": series})
        for (name, found), series in zip(cases, over_time, strict=True)
    ]


def over_time_document(runs: Sequence[Series]) -> dict[str, Any]:
    """Return means over the runs as JSON values: hours, and each quantity at these hours."""
    names = [field.name for field in fields(Series) if field.name != "hours"]
    return {"hours": mean_over_time("nodes", runs)[0], **{name: mean_over_time(name, runs)[1] for name in names}}


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by None."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(found: Spread, figure: str) -> str:
    digits = DIGITS.get(figure, 3)
    if not math.isfinite(found.mean[figure]):
        return UNKNOWN
    mean = f"{found.mean[figure]:.{digits}f}"
    return f"{mean} ± {found.deviation[figure]:.{digits}f}" if found.runs > 1 and figure != "steps" else mean
