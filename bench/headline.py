"""Which way to train on nodes that are taken away is the fastest, and which the cheapest?

    python bench/headline.py [--traces FOLDER] [--seeds 3] [--hours 24] [--rendezvous SECONDS] [--plot FILE]
    python bench/headline.py --restarts 30,300,900,1800

All strategies for the six published models, at 10, 16 and 33 percent hourly preemptions and, with --traces, on every
recording of nodes in a folder (its first hours). Each with its best parameters in hindsight: docs/simulator.md.
--restarts: only how many times as fast as checkpoint and restart Bamboo is, if restarts of the former, and of nothing
else, take so long.
"""

import math
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from _common import say, show, write_json
from bamboo.profiles.files import read_profile
from bamboo.simulation.strategies.choose import ON_DEMAND, STRATEGIES, strategy_result, workplace
from bamboo.simulation.strategies.summary import spread_of
from bamboo.traces.files import read_trace
from bamboo.traces.generate import Generation, generate
from bamboo.traces.trace import NodeTraceError, Trace

MODELS = ("gpt-2", "bert", "resnet", "gnmt", "vgg", "alexnet")
RATES = (0.10, 0.16, 0.33)
REPLACED = 0.5  # probability that a node that is missing is replaced within an hour
BASELINES = ("checkpoint", "checkpoint-blocking")
Row = dict[str, Any]


def run(
    traces: Annotated[Path | None, typer.Option(help="A folder with recordings.")] = None,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    hours: Annotated[float, typer.Option(help="Of each run, at most; recordings are cut.")] = 24.0,
    rendezvous: Annotated[
        float | None, typer.Option(help="Seconds until all processes of a restarted job have found each other.")
    ] = None,
    restarts: Annotated[
        str | None, typer.Option(help="Seconds of a restart of checkpoint and restart, with commas; nothing else.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help='Write the figures to this file, or to "-".')] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
) -> None:
    """Simulate, and print throughput, value and goodput beside checkpoints' and on-demand nodes'."""
    if restarts is not None:
        _restarts([float(one) for one in restarts.split(",")], seeds, hours)
        return
    recordings = dict(_recordings(traces)) if traces else {}
    cases = [f"{rate:.0%} hourly" for rate in RATES] + list(recordings)
    work = [(model, case, seeds, hours, rendezvous, recordings.get(case)) for model in MODELS for case in cases]
    say(f"{len(work)} cases of {len(STRATEGIES)} strategies")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = [row for found in pool.map(_case, work) for row in found]
    for case in cases:
        _show(case, [row for row in rows if row["case"] == case])
    write_json(json, {"seeds": seeds, "hours": hours, "rendezvous": rendezvous, "rows": rows})
    if plot is not None:
        _plot(rows, plot)


def _recordings(folder: Path) -> Iterator[tuple[str, Trace]]:
    for path in sorted(folder.glob("*.csv")):
        try:
            trace = read_trace(str(path))
        except NodeTraceError as error:
            say(f"left out: {error}")
            continue
        if trace.changes:
            yield path.stem, trace


def _case(work: tuple[str, str, int, float, float | None, Trace | None]) -> list[Row]:
    model, case, seeds, hours, rendezvous, recording = work
    profile = read_profile(f"{model}-v100")
    if rendezvous is not None:
        profile = replace(profile, times=replace(profile.times, rendezvous=rendezvous))
    place = workplace(profile)
    made = (
        generate(Generation(nodes=place.nodes, hours=hours, removal=_rate(case), addition=REPLACED), seed)
        for seed in range(1, seeds + 1)
    )
    traces = [recording] if recording else list(made)
    return [
        {
            "model": model,
            "case": case,
            "strategy": name,
            **spread_of([strategy_result(name, place, t, hours) for t in traces]).mean,
        }
        for name in STRATEGIES
    ]


def _restarts(seconds: list[float], seeds: int, hours: float) -> None:
    work = [(model, rate, seeds, hours, tuple(seconds)) for model in MODELS for rate in RATES]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(((one[0], one[1]) for one in work), pool.map(_slow_restarts, work), strict=True))
    for name in BASELINES:
        table = []
        for rate in RATES:
            for at, second in enumerate(seconds):
                ratios = [found[model, rate][name][at] for model in MODELS]
                mean = math.exp(statistics.fmean(map(math.log, ratios)))
                table.append(
                    [f"{rate:.0%}", f"{second:g}", f"{mean:.2f}", *(f"{ratio:.2f}" for ratio in ratios)]
                )  # fmt: skip
        show(f"bamboo over {name}", ["hourly", "restart, s", "mean", *MODELS], table)


def _slow_restarts(work: tuple[str, float, int, float, tuple[float, ...]]) -> dict[str, list[float]]:
    """Bamboo's samples over those of each baseline, for each duration of a restart."""
    model, rate, seeds, hours, seconds = work
    profile = read_profile(f"{model}-v100")
    place = workplace(profile)
    generation = Generation(nodes=place.nodes, hours=hours, removal=rate, addition=REPLACED)
    traces = [generate(generation, seed) for seed in range(1, seeds + 1)]
    ours = sum(strategy_result("bamboo", place, trace, hours).samples for trace in traces)
    found: dict[str, list[float]] = {name: [] for name in BASELINES}
    for second in seconds:
        slow = workplace(replace(profile, times=replace(profile.times, rendezvous=second)))
        for name in BASELINES:
            theirs = sum(strategy_result(name, slow, trace, hours).samples for trace in traces)
            found[name].append(ours / theirs if theirs else math.inf)
    return found


def _rate(case: str) -> float:
    return int(case.partition("%")[0]) / 100


def _show(case: str, rows: list[Row]) -> None:
    by = {(row["model"], row["strategy"]): row for row in rows}
    table = []
    for model in MODELS:
        for name in STRATEGIES:
            row = by[model, name]
            table.append(
                [
                    model, name, f"{row['throughput']:.1f}", f"{row['usd_per_hour']:.2f}", f"{row['value']:.3f}",
                    f"{row['goodput']:.3f}", _over(row, by[model, "checkpoint"], "throughput"),
                    _over(row, by[model, ON_DEMAND], "value"),
                ]
            )  # fmt: skip
    heads = ["model", "strategy", "samples/s", "USD/h", "value", "goodput", "x checkpoint", "x value on demand"]
    show(case, heads, table)


def _over(row: Row, other: Row, figure: str) -> str:
    return f"{row[figure] / other[figure]:.2f}" if other[figure] else "-"


def _plot(rows: list[Row], path: Path) -> None:
    """Throughput of each strategy over that of checkpoints, and value over that of on-demand nodes."""
    from matplotlib.figure import Figure

    from bamboo.simulation.plots import COLOURS, GROUND, INK, SOFT

    names = [name for name in STRATEGIES if name != ON_DEMAND]
    figure = Figure(figsize=(13, 6.4), facecolor=GROUND, layout="constrained")
    panels = (("throughput", "checkpoint", "samples/s over checkpoint and restart"),
              ("value", ON_DEMAND, "samples per USD over on-demand nodes"))  # fmt: skip
    for line, (figure_name, base, said) in enumerate(panels):
        for column, rate in enumerate(RATES):
            axes = figure.add_subplot(2, len(RATES), line * len(RATES) + column + 1)
            by = {(row["model"], row["strategy"]): row for row in rows if row["case"] == f"{rate:.0%} hourly"}
            for place, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
                heights = [by[model, name][figure_name] / by[model, base][figure_name] for model in MODELS]
                at = [number + (place - len(names) / 2) * 0.11 for number in range(len(MODELS))]
                axes.bar(at, heights, 0.11, color=colour, label=name)
            axes.set_xticks(range(len(MODELS)), MODELS, fontsize=8, color=SOFT)
            axes.set_title(f"{said}, {rate:.0%} hourly", fontsize=9, color=INK, loc="left")
            axes.tick_params(colors=SOFT, labelsize=8)
            axes.set_ylim(bottom=0)
            if line == column == 0:
                shown = axes.get_legend_handles_labels()
                figure.legend(*shown, loc="outside lower center", ncols=len(names), frameon=False, fontsize=8)
    figure.savefig(path, dpi=85)


if __name__ == "__main__":
    typer.run(run)
