"""Simulated runs as a person or a program reads them. Pure."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from bamboo.simulation.figures import FIGURES, Spread

HEADS = {
    "preemptions": "PREEMPTIONS", "interval": "INTERVAL H", "lifetime": "LIFETIME H", "fatal": "FATAL",
    "nodes": "NODES", "throughput": "SAMPLES/S", "usd_per_hour": "USD/H", "value": "VALUE", "hours": "HOURS",
    "steps": "STEPS",
}  # fmt: skip
DIGITS = {"preemptions": 2, "fatal": 3, "nodes": 2, "throughput": 2, "usd_per_hour": 2, "steps": 0}
Case = tuple[str, Spread]


def simulation_table(cases: Sequence[Case]) -> Table:
    """A line for each case: means, with standard deviations where there are several runs."""
    shown = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in ("CASE", "RUNS", *HEADS.values()):
        shown.add_column(head, justify="left" if head == "CASE" else "right")
    for name, found in cases:
        cells = [_cell(found, figure) for figure in HEADS]
        shown.add_row(name, str(found.runs), *cells)
    return shown


def simulation_documents(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """For programs: each case with the means, deviations and the share of runs with a fatal preemption."""
    return [{"case": name, **asdict(found)} for name, found in cases]


def simulation_csv(cases: Sequence[Case]) -> str:
    """A line for each case: name, runs, share of runs with a fatal preemption, mean and deviation of each figure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = [column for figure in FIGURES for column in (figure, f"{figure}_deviation")]
    writer.writerow(["case", "runs", "fatal_share", *columns])
    for name, found in cases:
        values = [value for figure in FIGURES for value in (found.mean[figure], found.deviation[figure])]
        writer.writerow([name, found.runs, found.fatal_share, *values])
    return text.getvalue()


def _cell(found: Spread, figure: str) -> str:
    digits = DIGITS.get(figure, 3)
    mean = f"{found.mean[figure]:.{digits}f}"
    return f"{mean} ± {found.deviation[figure]:.{digits}f}" if found.runs > 1 and figure != "steps" else mean
