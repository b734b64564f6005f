"""Simulated runs as a table and as JSON. Pure."""

import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from rich.console import Group

from bamboo.simulation.figures import Spread
from bamboo.simulation.job.job_record import Series, mean_over_time
from bamboo.terminal.tables import fitted, indented_json

COLUMNS = {  # by figure: head and digits after the point
    "preemptions": ("PREEMPTIONS", 2),
    "takeovers": ("TAKEOVERS", 2),
    "restores": ("RESTORES", 2),
    "fatal": ("FATAL", 3),
    "pause": ("PAUSE S", 2),
    "waited": ("WAITED H", 3),
    "nodes": ("NODES", 2),
    "throughput": ("SAMPLES/S", 2),
    "usd_per_hour": ("USD/H", 2),
    "usd": ("USD", 2),
    "zone_gb_per_hour": ("ZONE GB/H", 1),
    "zone_usd_per_hour": ("ZONE USD/H", 2),
    "value": ("VALUE", 3),
    "goodput": ("GOODPUT", 3),
    "redone": ("REDONE", 3),
    "hours": ("HOURS", 3),
    "steps": ("STEPS", 0),
}
UNKNOWN = "–"
Case = tuple[str, Spread]


def simulation_table(cases: Sequence[Case], width: int | None = None) -> Group:
    """Return a table of the means of each case, with standard deviations if it has several runs.

    cases: at least one. width: columns of the terminal; None: unlimited. The table leaves out traffic between zones if
    there is none.
    """
    crosses = any(found.mean.get("zone_gb_per_hour") for _, found in cases)
    known = [f for f in COLUMNS if f in cases[0][1].mean and (crosses or not f.startswith("zone_"))]
    heads = ("CASE", "RUNS", *(COLUMNS[figure][0] for figure in known))
    return fitted(heads, [(name, str(found.runs), *(_cell(found, f) for f in known)) for name, found in cases], width)


def simulation_json(cases: Sequence[Case], runs: Sequence[Sequence[Series]]) -> str:
    """Return the cases as JSON: number of runs, means, standard deviations, and the means over time.

    runs: the runs of each case.
    """
    return indented_json(
        [
            {"case": name, **asdict(found), "overTime": _over_time(series)}
            for (name, found), series in zip(cases, runs, strict=True)
        ]
    )


def _over_time(runs: Sequence[Series]) -> dict[str, Any]:
    """Return hours, and the mean over the runs of each quantity at these hours."""
    names = [field.name for field in fields(Series) if field.name != "hours"]
    return {"hours": mean_over_time("nodes", runs)[0], **{name: mean_over_time(name, runs)[1] for name in names}}


def _cell(found: Spread, figure: str) -> str:
    digits = COLUMNS[figure][1]
    if not math.isfinite(found.mean[figure]):
        return UNKNOWN
    mean = f"{found.mean[figure]:.{digits}f}"
    return f"{mean} ± {found.deviation[figure]:.{digits}f}" if found.runs > 1 and figure != "steps" else mean
