"""Plots of simulated runs over time, in the job page's colours. Needs matplotlib (`pip install bamboo-spot[plots]`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bamboo.simulation.figures import SimulationError
from bamboo.simulation.job.job_record import JobResult, Series, mean_over_time
from bamboo_core.complaints import system_reason

INK, SOFT, LINE, GROUND = "#18201b", "#535e56", "#d8ded7", "#f3f5f1"  # of the job page, light scheme
COLOURS: Final = ("#1d7f48", "#1a6aae", "#d08a1d", "#84338f", "#c2554d", "#7a5a2e", "#6fa8d6", "#8b958d")
PANELS: Final = (
    ("nodes", "nodes"),
    ("throughput", "samples per second"),
    ("usd_per_hour", "USD per hour"),
    ("value", "samples per second for each USD per hour"),
    ("goodput", "goodput"),
    ("preemptions", "preemptions so far"),
    ("takeovers", "takeovers so far"),
    ("restores", "restores so far"),
    ("pauses", "seconds of pauses so far"),
)
MOST_RUNS = 20  # single runs of a case drawn behind their mean
COLUMNS = 3


def draw(cases: Sequence[tuple[str, Sequence[JobResult]]], title: str, path: Path) -> None:
    """Draw one panel per quantity, one colour per case: its first MOST_RUNS runs faint, the mean of all runs solid.

    path: the PNG file. Raises SimulationError if it cannot be written.
    """
    from matplotlib.figure import Figure

    rows = -(-len(PANELS) // COLUMNS)
    figure = Figure(figsize=(4.6 * COLUMNS, 2.9 * rows), facecolor=GROUND, layout="constrained")
    figure.suptitle(title, color=INK, x=0.01, ha="left", fontsize=13, fontweight="bold")
    for number, (name, quantity) in enumerate(PANELS, start=1):
        axes = figure.add_subplot(rows, COLUMNS, number)
        _style(axes, quantity)
        for (case, results), colour in zip(cases, COLOURS * len(cases), strict=False):
            _curves(axes, name, case, [result.series for result in results], colour)
        axes.set_ylim(bottom=0)
        if number == 1 and len(cases) > 1:
            axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise SimulationError(f"--plot: cannot write {path}: {system_reason(error)}") from None


def _style(axes: Any, quantity: str) -> None:
    axes.set_facecolor("#ffffff")
    axes.set_title(quantity, color=SOFT, fontsize=9, loc="left")
    axes.tick_params(colors=SOFT, labelsize=8)
    axes.grid(color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("hours", color=SOFT, fontsize=8)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(LINE)


def _curves(axes: Any, name: str, case: str, runs: Sequence[Series], colour: str) -> None:
    if len(runs) > 1:
        for series in runs[:MOST_RUNS]:
            axes.plot(series.hours, getattr(series, name), color=colour, alpha=0.15, linewidth=0.8)
    hours, values = mean_over_time(name, runs)
    axes.plot(hours, values, color=colour, linewidth=1.6, label=case)
