"""Which way to train on nodes that are taken away is the fastest, and which the cheapest?

    python bench/headline.py [--traces FOLDER] [--seeds 3] [--hours 24] [--rendezvous S] [--json FILE] [--plot FILE]
    python bench/headline.py --restarts 30,300,900,1800 [--seeds 2]

All strategies for the six published models, at 10, 16 and 33 percent hourly preemptions and, with --traces, on every
recording of nodes in a folder (its first hours). Each with its best parameters in hindsight: docs/simulator.md. Printed
are the tables of docs/benchmarks.md; --json has all figures.
--restarts: only how many times as fast as those that restart Bamboo is, if restarts of the former, and of nothing else,
take so long.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from _common import say, write_json
from bamboo.profiles.files import read_profile
from bamboo.simulation.strategies.choose import ON_DEMAND, SPOT, STRATEGIES, Workplace, strategy_result, workplace
from bamboo.simulation.strategies.summary import spread_of
from bamboo.traces.files import read_trace
from bamboo.traces.generate import Generation, generate
from bamboo.traces.trace import NodeTraceError, Trace

MODELS = ("gpt-2", "bert", "resnet", "gnmt", "vgg", "alexnet")
RATES = (0.10, 0.16, 0.33)
REPLACED = 0.5  # probability that a node that is missing is replaced within an hour
BASELINES = ("checkpoint", "checkpoint-blocking", "torchrun-elastic", "torchrun-fixed")
OURS = "bamboo"
MORE_COLOURS = ("#b3b84a", "#3b8d8a")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A model on recorded nodes, or on made-up ones of which each is taken away within an hour with probability `rate`.

    case: the nodes' name. seeds: runs on made-up nodes. hours: of each run, at most.
    """

    model: str
    case: str
    seeds: int
    hours: float
    rate: float = 0.0
    recording: Trace | None = None

    def place(self, rendezvous: float | None) -> Workplace:
        """rendezvous: seconds, if not the profile's."""
        profile = read_profile(f"{self.model}-v100")
        if rendezvous is not None:
            profile = replace(profile, times=replace(profile.times, rendezvous=rendezvous))
        return workplace(profile)

    def traces(self, nodes: int) -> list[Trace]:
        if self.recording is not None:
            return [self.recording]
        generation = Generation(nodes=nodes, hours=self.hours, removal=self.rate, addition=REPLACED)
        return [generate(generation, seed) for seed in range(1, self.seeds + 1)]


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
    made_up = {f"{rate:.0%}": rate for rate in RATES}
    work = [
        Work(model=model, case=case, seeds=seeds, hours=hours, rate=rate, recording=recording)
        for case, rate, recording in (
            *((case, rate, None) for case, rate in made_up.items()),
            *((case, 0.0, recording) for case, recording in recordings.items()),
        )
        for model in MODELS
    ]
    say(f"{len(work)} cases of {len(STRATEGIES)} strategies")
    rows = [row for found in _in_processes(partial(_case, rendezvous), work) for row in found]
    _show_made_up(rows, list(made_up))
    if recordings:
        _show_recordings(rows, list(recordings))
    write_json(json, {"seeds": seeds, "hours": hours, "rendezvous": rendezvous, "rows": rows})
    if plot is not None:
        _plot(rows, plot)


def _in_processes(what: Callable[[Work], Any], work: Sequence[Work]) -> Iterator[Any]:
    """Results in the order of the work, and a line on standard error for each."""
    began = time.monotonic()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for number, (one, found) in enumerate(zip(work, pool.map(what, work), strict=True), start=1):
            say(f"{number} of {len(work)} after {time.monotonic() - began:.0f} s: {one.model}, {one.case}")
            yield found


def _recordings(folder: Path) -> Iterator[tuple[str, Trace]]:
    for path in sorted(folder.glob("*.csv")):
        try:
            trace = read_trace(str(path))
        except NodeTraceError as error:
            say(f"left out: {error}")
            continue
        if trace.changes:
            yield path.stem, trace


def _case(rendezvous: float | None, work: Work) -> list[Row]:
    place = work.place(rendezvous)
    traces = work.traces(place.nodes)
    return [
        {
            "model": work.model,
            "case": work.case,
            "strategy": name,
            **spread_of([strategy_result(name, place, trace, work.hours) for trace in traces]).mean,
        }
        for name in STRATEGIES
    ]


def _restarts(seconds: list[float], seeds: int, hours: float) -> None:
    work = [
        Work(model=model, case=f"{rate:.0%}", seeds=seeds, hours=hours, rate=rate) for model in MODELS for rate in RATES
    ]
    results = _in_processes(partial(_slow_restarts, seconds), work)
    found = {(one.model, one.rate): result for one, result in zip(work, results, strict=True)}
    lines = []
    for rate in RATES:
        for name in BASELINES:
            means = [_mean(found[model, rate][name][at] for model in MODELS) for at in range(len(seconds))]
            lines.append([f"{rate:.0%}, `{name}`", *(f"{mean:.2f}" for mean in means)])
    _markdown(["Bamboo's samples/s over those of", *(f"restarts of {second:g} s" for second in seconds)], lines)


def _slow_restarts(seconds: Sequence[float], work: Work) -> dict[str, list[float]]:
    """Bamboo's samples over those of each baseline, for each duration of a restart."""
    place = work.place(None)
    traces = work.traces(place.nodes)
    ours = sum(strategy_result(OURS, place, trace, work.hours).samples for trace in traces)
    found: dict[str, list[float]] = {name: [] for name in BASELINES}
    for second in seconds:
        slow = work.place(second)
        for name in BASELINES:
            theirs = sum(strategy_result(name, slow, trace, work.hours).samples for trace in traces)
            found[name].append(ours / theirs if theirs else math.inf)
    return found


def _mean(ratios: Iterable[float]) -> float:
    """Geometric, of what is known."""
    known = [ratio for ratio in ratios if ratio > 0 and math.isfinite(ratio)]
    return math.exp(statistics.fmean(map(math.log, known))) if known else math.nan


def _over(rows: dict[tuple[str, str], Row], name: str, base: str, figure: str) -> float:
    """Mean over the models that make any progress with both."""
    pairs = [(rows[model, name][figure], rows[model, base][figure]) for model in MODELS]
    return _mean(one / other if other else math.inf for one, other in pairs)


def _of(rows: Sequence[Row], case: str) -> dict[tuple[str, str], Row]:
    return {(row["model"], row["strategy"]): row for row in rows if row["case"] == case}


def _markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    for line in (heads, ["---"] * len(heads), *lines):
        print(f"| {' | '.join(line)} |")
    print()


def _show_made_up(rows: Sequence[Row], cases: Sequence[str]) -> None:
    """Means over the models, then each model."""
    by = {case: _of(rows, case) for case in cases}
    heads = ["", *(head for case in cases for head in (f"{case}: samples/s", "value", "goodput"))]
    lines = []
    for name in STRATEGIES:
        line = [name]
        for case in cases:
            goodput = statistics.fmean(by[case][model, name]["goodput"] for model in MODELS)
            speed, value = (
                _over(by[case], name, base, figure)
                for base, figure in (("checkpoint", "throughput"), (ON_DEMAND, "value"))
            )
            line += [f"{speed:.2f}", f"{value:.2f}", f"{goodput:.3f}"]
        lines.append(line)
    _markdown(heads, lines)
    heads = ["", "Bamboo: samples/s", "USD/h", "checkpoint: samples/s", "on-demand: samples/s", "USD/h", "best other"]
    lines = []
    for model in MODELS:
        for case in cases:
            ours, theirs, steady = (by[case][model, name] for name in (OURS, "checkpoint", ON_DEMAND))
            others = {name: by[case][model, name]["throughput"] for name in SPOT if name != OURS}
            best = max(others, key=others.__getitem__)
            lines.append(
                [
                    f"{model}, {case}", f"{ours['throughput']:.1f}", f"{ours['usd_per_hour']:.2f}",
                    f"{theirs['throughput']:.1f}", f"{steady['throughput']:.1f}", f"{steady['usd_per_hour']:.2f}",
                    f"{others[best]:.1f} ({best})",
                ]
            )  # fmt: skip
    _markdown(heads, lines)


def _show_recordings(rows: Sequence[Row], cases: Sequence[str]) -> None:
    heads = [
        "", "Nodes", "Losses", "Bamboo: samples/s over checkpoint", "value over on-demand", "goodput",
        "Best other: samples/s over checkpoint",
    ]  # fmt: skip
    lines = []
    for case in cases:
        by = _of(rows, case)
        others = {
            name: _over(by, name, "checkpoint", "throughput") for name in SPOT if name not in (OURS, "checkpoint")
        }
        best = max(others, key=lambda name: others[name] if others[name] == others[name] else 0.0)
        goodput = statistics.fmean(by[model, OURS]["goodput"] for model in MODELS)
        held = by["bert", OURS]
        lines.append(
            [
                case, f"{held['nodes']:.1f}", f"{held['preemptions']:.0f}",
                f"{_over(by, OURS, 'checkpoint', 'throughput'):.2f}", f"{_over(by, OURS, ON_DEMAND, 'value'):.2f}",
                f"{goodput:.3f}", f"{others[best]:.2f} ({best})",
            ]
        )  # fmt: skip
    _markdown(heads, lines)


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
            by = {(row["model"], row["strategy"]): row for row in rows if row["case"] == f"{rate:.0%}"}
            for place, (name, colour) in enumerate(zip(names, (*COLOURS, *MORE_COLOURS), strict=False)):
                heights = [by[model, name][figure_name] / by[model, base][figure_name] for model in MODELS]
                at = [number + (place - len(names) / 2) * 0.085 for number in range(len(MODELS))]
                axes.bar(at, heights, 0.085, color=colour, label=name)
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
