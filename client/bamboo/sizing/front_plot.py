"""Time and cost of options, in the job page's colours. Needs matplotlib (`pip install bamboo-spot[plots]`)."""

from collections.abc import Sequence
from pathlib import Path

from bamboo.simulation.plots import COLOURS, INK, SOFT, new_figure, save, style
from bamboo.sizing.trials.trial import Assessment


def draw_front(
    simulated: Sequence[Assessment], front: Sequence[Assessment], chosen: Assessment | None, title: str, path: Path
) -> None:
    """Each option with the deviation of its runs; the front as a line, the chosen one large.

    Raises SimulationError if matplotlib is missing or the file cannot be written.
    """
    figure = new_figure("--plot", (7.6, 5.0), title)
    axes = figure.add_subplot(1, 1, 1)
    style(axes, "cost of the whole job, USD", "hours of the whole job")
    most = 2 * max(one.usd for one in front)  # what costs far more would leave no room for the rest
    for one in simulated:
        if one not in front and one.usd <= most:
            axes.plot(one.hours, one.usd, "o", color=SOFT, alpha=0.45, markersize=4)
    axes.plot([one.hours for one in front], [one.usd for one in front], color=COLOURS[0], linewidth=1.2, alpha=0.6)
    for one in front:
        special = one is chosen
        axes.errorbar(
            one.hours,
            one.usd,
            xerr=one.deviation("hours"),
            yerr=one.deviation("usd"),
            fmt="o",
            color=COLOURS[2] if special else COLOURS[0],
            markersize=9 if special else 5,
            elinewidth=0.9,
            capsize=2,
        )
        option = one.candidate
        axes.annotate(
            f"{option.stages} x {option.pipelines}" + (f" + {option.standby}" if option.standby else ""),
            (one.hours, one.usd),
            xytext=(6, 6),
            textcoords="offset points",
            fontsize=8,
            color=INK,
        )
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    save(figure, "--plot", path)
