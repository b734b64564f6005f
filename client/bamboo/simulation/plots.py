"""Plots of simulated runs over time, in the job page's colours. Needs matplotlib (`pip install bamboo-spot[plots]`)."""

from collections.abc import Sequence
from importlib.util import find_spec
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
    """Draw a panel for each quantity and a colour for each case: single runs faint, their mean in full. Raises
    SimulationError if matplotlib is missing or the file cannot be written.
    """
    rows = -(-len(PANELS) // COLUMNS)
    figure = new_figure("--plot", (4.6 * COLUMNS, 2.9 * rows), title)
    for number, (name, said) in enumerate(PANELS, start=1):
        axes = figure.add_subplot(rows, COLUMNS, number)
        style(axes, said, "hours")
        for (case, results), colour in zip(cases, COLOURS * len(cases), strict=False):
            _curves(axes, name, (case, [result.series for result in results]), colour)
        axes.set_ylim(bottom=0)
        if number == 1 and len(cases) > 1:
            axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    save(figure, "--plot", path)


def new_figure(flag: str, size: tuple[float, float], title: str) -> Any:
    """Create a figure with a title. flag: of the command line, for messages. Raises SimulationError if matplotlib is
    missing.
    """
    if find_spec("matplotlib") is None:
        raise SimulationError(
            f"{flag} needs matplotlib, not installed here; pip install 'bamboo-spot[plots]' installs it"
        )
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, facecolor=GROUND, layout="constrained")
    figure.suptitle(title, color=INK, x=0.01, ha="left", fontsize=13, fontweight="bold")
    return figure


def save(figure: Any, flag: str, path: Path) -> None:
    """Write the figure to a PNG file. Raises SimulationError if the file cannot be written."""
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise SimulationError(f"{flag}: cannot write {path}: {system_reason(error)}") from None


def style(axes: Any, said: str, across: str) -> None:
    """Style the axes. said: the quantity drawn; across: the x axis."""
    axes.set_facecolor("#ffffff")
    axes.set_title(said, color=SOFT, fontsize=9, loc="left")
    axes.tick_params(colors=SOFT, labelsize=8)
    axes.grid(color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(across, color=SOFT, fontsize=8)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(LINE)


def _curves(axes: Any, name: str, case: tuple[str, Sequence[Series]], colour: str) -> None:
    said, runs = case
    if len(runs) > 1:
        for series in runs[:MOST_RUNS]:
            axes.plot(series.hours, getattr(series, name), color=colour, alpha=0.15, linewidth=0.8)
    hours, values = mean_over_time(name, runs)
    axes.plot(hours, values, color=colour, linewidth=1.6, label=said)
