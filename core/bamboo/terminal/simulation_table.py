"""Simulated runs as a person or a program reads them. Pure."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from rich.table import Table

from bamboo.simulation.figures import Spread
from bamboo.simulation.job.job_record import Series, mean_over_time

HEADS = {
    "preemptions": "PREEMPTIONS", "takeovers": "TAKEOVERS", "restores": "RESTORES", "interval": "INTERVAL H",
    "lifetime": "LIFETIME H", "fatal": "FATAL", "pause": "PAUSE S", "waited": "WAITED H", "nodes": "NODES",
    "throughput": "SAMPLES/S", "usd_per_hour": "USD/H", "usd": "USD",
    "zone_gb_per_hour": "ZONE GB/H", "zone_usd_per_hour": "ZONE USD/H", "value": "VALUE", "goodput": "GOODPUT",
    "redone": "REDONE", "stalled": "STALLED", "idle": "IDLE", "saving": "SAVING",
    "hours": "HOURS", "steps": "STEPS",
}  # fmt: skip
DIGITS = {
    "preemptions": 2, "takeovers": 2, "restores": 2, "fatal": 3, "pause": 2, "nodes": 2, "throughput": 2,
    "usd_per_hour": 2, "usd": 2,
    "zone_gb_per_hour": 1, "zone_usd_per_hour": 2, "steps": 0,
}  # fmt: skip
Case = tuple[str, Spread]


def simulation_table(cases: Sequence[Case]) -> Table:
    """A line for each of at least one case: means, with standard deviations where there are several runs."""
    shown = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    known = [figure for figure in HEADS if figure in cases[0][1].mean]
    for head in ("CASE", "RUNS", *(HEADS[figure] for figure in known)):
        shown.add_column(head, justify="left" if head == "CASE" else "right")
    for name, found in cases:
        cells = [_cell(found, figure) for figure in known]
        shown.add_row(name, str(found.runs), *cells)
    return shown


def simulation_documents(
    cases: Sequence[Case], over_time: Sequence[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """For programs: each case with the means, deviations and the share of runs with a fatal preemption.

    over_time: of each case, as `over_time_document` makes it, if it is known.
    """
    documents = [{"case": name, **asdict(found)} for name, found in cases]
    for document, series in zip(documents, over_time or (), strict=over_time is not None):
        document["overTime"] = series
    return [_finite(document) for document in documents]


def over_time_document(runs: Sequence[Series]) -> dict[str, Any]:
    """Means over the runs, for programs: hours, and as many values of each quantity."""
    names = [field.name for field in fields(Series) if field.name != "hours"]
    return {"hours": mean_over_time("nodes", runs)[0], **{name: mean_over_time(name, runs)[1] for name in names}}


def _finite(value: Any) -> Any:
    """JSON has no number for what is not known."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def simulation_csv(cases: Sequence[Case]) -> str:
    """A line for each case: name, runs, share of runs with a fatal preemption, mean and deviation of each figure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = list(cases[0][1].mean)
    columns = [column for figure in names for column in (figure, f"{figure}_deviation")]
    writer.writerow(["case", "runs", "fatal_share", *columns])
    for name, found in cases:
        values = [value for figure in names for value in (found.mean[figure], found.deviation[figure])]
        writer.writerow([name, found.runs, found.fatal_share, *values])
    return text.getvalue()


def _cell(found: Spread, figure: str) -> str:
    digits = DIGITS.get(figure, 3)
    mean = f"{found.mean[figure]:.{digits}f}"
    return f"{mean} ± {found.deviation[figure]:.{digits}f}" if found.runs > 1 and figure != "steps" else mean
