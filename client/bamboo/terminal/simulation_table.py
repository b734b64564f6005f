"""Simulated runs as a table and as JSON. Pure."""

import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from rich.console import Group

from bamboo.simulation.figures import Spread
from bamboo.simulation.job.job_record import Series, mean_over_time
from bamboo.terminal.tables import fitted

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


def simulation_documents(cases: Sequence[Case], over_time: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cases as JSON values: number of runs, means, standard deviations, and the means over time.

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
    """Return the value with NaN and infinities, which JSON does not have, replaced by None, also inside containers."""
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
