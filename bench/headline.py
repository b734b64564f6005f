"""A comparison of the speed and cost of ways to train on nodes that are taken away.

    python bench/headline.py [--traces FOLDER] [--cases 33%,p3-trace] [--quick] [--seeds 1] [--hours 24]
    python bench/headline.py --restarts 30,300,900,1800 [--cases 16%] [--seeds 1]

Bamboo's figures come from its real coordinator, driven in virtual time; the published strategies take their step times
and memory needs from the same functions. The six published models run at 10, 16 and 33 percent hourly preemptions and,
with --traces, on every recording of nodes in a folder (its first hours). Each strategy gets its best parameters, zones
and number of nodes in hindsight, by throughput and by value. It prints the tables of docs/benchmarks.md; --json has all
figures. --quick: two models, one rate and six hours. --restarts: print only Bamboo's speed relative to restarting
strategies, for these restart times in seconds.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from _common import say, write_json
from _recordings import recordings
from bamboo.profiles.files import read_profile
from bamboo.simulation.job.zone_traffic import GB
from bamboo.traces.generate import Generation, generate
from bamboo.traces.trace import Trace
from bamboo_core.job.manifest import parse_manifest
from strategies.choose import ON_DEMAND, SPOT, Aim
from strategies.comparison import OURS, STRATEGIES, ComparedJob, CoordinatorRuns, compared, published_job
from strategies.drive import StrategyResult
from strategies.timeline import HOUR

MODELS = ("gpt-2", "bert", "resnet", "gnmt", "vgg", "alexnet")
RATES = (0.10, 0.16, 0.33)
QUICK_MODELS, QUICK_RATES, QUICK_HOURS = ("bert", "vgg"), (0.33,), 6.0
REPLACED = 0.5  # probability that a missing node is replaced within an hour
BASELINES = ("checkpoint", "checkpoint-blocking", "torchrun-elastic", "torchrun-fixed")
VALUED = "bamboo, objective: Value"  # the coordinator releases nodes that add less than they cost
NAMES = (*STRATEGIES, VALUED)
MORE_COLOURS = ("#b3b84a", "#3b8d8a", "#c98f4e")
PROCESSES = 2
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A model, and the nodes that train it: from a recording, or generated. A generated node is taken away within an
    hour with probability `rate`.
    """

    model: str
    case: str  # the name of the nodes
    seeds: int  # runs on generated nodes
    hours: float  # the most per run
    rate: float = 0.0
    recording: Trace | None = None

    def job(self, rendezvous: float | None = None) -> ComparedJob:
        """Return the job with its published batch. rendezvous: seconds that replace the profile's."""
        profile = read_profile(f"{self.model}-v100")
        if rendezvous is not None:
            profile = replace(profile, times=replace(profile.times, rendezvous=rendezvous))
        return published_job(profile)

    def traces(self, nodes: int) -> list[Trace]:
        if self.recording is not None:
            return [self.recording]
        generation = Generation(nodes=nodes, hours=self.hours, removal=self.rate, addition=REPLACED)
        return [generate(generation, seed) for seed in range(1, self.seeds + 1)]


def run(
    traces: Annotated[Path | None, typer.Option(help="A folder with recordings.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two models, one rate, six hours.")] = False,
    seeds: Annotated[int, typer.Option(min=1)] = 1,
    hours: Annotated[float, typer.Option(help="Of each run, at most; recordings are cut.")] = 24.0,
    cases: Annotated[str | None, typer.Option(help="Only these rates and recordings, as 33%,p3-trace.")] = None,
    restarts: Annotated[
        str | None, typer.Option(help="Seconds of a restart of checkpoint and restart, with commas; nothing else.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help='Write the figures to this file, or to "-".')] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
) -> None:
    """Simulate all strategies; print throughput over `checkpoint`, value over on-demand nodes, and goodput."""
    models, rates = (QUICK_MODELS, list(QUICK_RATES)) if quick else (MODELS, list(RATES))
    hours = min(hours, QUICK_HOURS) if quick else hours
    wanted = None if cases is None else set(cases.split(","))
    rates = [rate for rate in rates if wanted is None or f"{rate:.0%}" in wanted]
    if restarts is not None:
        _restarts([float(one) for one in restarts.split(",")], models, rates, seeds, hours)
        return
    recorded = dict(recordings(traces)) if traces else {}
    work = [
        Work(model=model, case=case, seeds=seeds, hours=hours, rate=rate, recording=recording)
        for case, rate, recording in (
            *((f"{rate:.0%}", rate, None) for rate in rates),
            *((case, 0.0, recording) for case, recording in recorded.items() if wanted is None or case in wanted),
        )
        for model in models
    ]
    say(f"{len(work)} cases of {len(NAMES)} strategies")
    rows = [row for found in _in_processes(_case, work) for row in found]
    table = Table(rows=rows, models=models)
    if rates:
        _show_made_up(table, [f"{rate:.0%}" for rate in rates])
    _show_cases(table, list(dict.fromkeys(one.case for one in work)))
    write_json(json, {"seeds": seeds, "hours": hours, "rows": rows})
    if plot is not None:
        _plot(table, [f"{rate:.0%}" for rate in rates], plot)


def _in_processes(what: Callable[[Work], Any], work: Sequence[Work]) -> Iterator[Any]:
    """Run `what` for each work in a pool of processes. Yield the results in order; report each on standard error."""
    began = time.monotonic()
    with ProcessPoolExecutor(PROCESSES) as pool:
        for number, (one, found) in enumerate(zip(work, pool.map(what, work), strict=True), start=1):
            say(f"{number} of {len(work)} after {time.monotonic() - began:.0f} s: {one.model}, {one.case}")
            yield found


def _case(work: Work) -> list[Row]:
    job = work.job()
    found: dict[tuple[str, Aim], list[StrategyResult]] = {}
    bounds = list[float]()
    for trace in work.traces(job.place.nodes):
        for name in (ON_DEMAND, *SPOT):
            for objective in Aim:
                found.setdefault((name, objective), []).append(compared(name, job, trace, work.hours, objective))
        for name, one in ((OURS, job), (VALUED, _valued(job))):
            runs = CoordinatorRuns(one, trace, work.hours)
            for objective in Aim:
                found.setdefault((name, objective), []).append(runs.best(objective))
            if name == OURS:
                bounds.append(runs.bound(Aim.THROUGHPUT))
    return [
        {
            "model": work.model,
            "case": work.case,
            "strategy": name,
            "objective": objective.value,
            "bound": statistics.fmean(bounds),
            **_means(results),
        }
        for (name, objective), results in found.items()
    ]


def _means(results: Sequence[StrategyResult]) -> Row:
    """Return the means of a strategy's figures over its runs."""

    def mean(figure: Callable[[StrategyResult], float]) -> float:
        return statistics.fmean(map(figure, results))

    return {
        "preemptions": mean(lambda one: one.preemptions),
        "nodes": mean(lambda one: one.nodes),
        "throughput": mean(lambda one: one.throughput),
        "usd_per_hour": mean(lambda one: one.usd_per_hour),
        "zone_gb_per_hour": mean(lambda one: one.crossed / GB / (one.duration / HOUR)),
        "zone_usd_per_hour": mean(lambda one: one.zone_usd / (one.duration / HOUR)),
        "value": mean(lambda one: one.value),
        "goodput": mean(lambda one: one.goodput),
        "redone": mean(lambda one: one.redone / one.duration),
        "stalled": mean(lambda one: one.stalled / one.duration),
        "idle": mean(lambda one: one.idle / one.duration),
        "saving": mean(lambda one: one.saving / one.duration),
        "hours": mean(lambda one: one.duration / HOUR),
    }


def _valued(job: ComparedJob) -> ComparedJob:
    return _edited(job, "elastic", objective=Aim.VALUE.value)


def _edited(job: ComparedJob, section: str, **fields: Any) -> ComparedJob:
    spec = job.document["spec"]
    document = {**job.document, "spec": {**spec, section: {**spec[section], **fields}}}
    return ComparedJob(place=job.place, spec=parse_manifest(document), document=document)


def _restarts(seconds: list[float], models: Sequence[str], rates: Sequence[float], seeds: int, hours: float) -> None:
    work = [
        Work(model=model, case=f"{rate:.0%}", seeds=seeds, hours=hours, rate=rate) for model in models for rate in rates
    ]
    results = _in_processes(partial(_slow_restarts, seconds), work)
    found = {(one.model, one.rate): result for one, result in zip(work, results, strict=True)}
    lines = []
    for rate in rates:
        for name in BASELINES:
            means = [_mean([found[model, rate][name][at] for model in models]) for at in range(len(seconds))]
            lines.append([f"{rate:.0%}, `{name}`", *means])
    _markdown(["Bamboo's samples/s over those of, restarts of", *(f"{second:g} s" for second in seconds)], lines)


def _slow_restarts(seconds: Sequence[float], work: Work) -> dict[str, list[float]]:
    """Return Bamboo's samples divided by each baseline's, for each restart time; inf if the baseline trains none."""
    job = work.job()
    traces = work.traces(job.place.nodes)
    ours = sum(compared(OURS, job, trace, work.hours).samples for trace in traces)
    ratios: dict[str, list[float]] = {name: [] for name in BASELINES}
    for second in seconds:
        slow = work.job(second)
        for name in BASELINES:
            theirs = sum(compared(name, slow, trace, work.hours).samples for trace in traces)
            ratios[name].append(ours / theirs if theirs else math.inf)
    return ratios


def _mean(ratios: Sequence[float]) -> str:
    """Return the geometric mean of the positive finite ratios as text, with their number if not all; "–" if none."""
    finite = [ratio for ratio in ratios if ratio > 0 and math.isfinite(ratio)]
    if not finite:
        return "–"
    mean = math.exp(statistics.fmean(map(math.log, finite)))
    return f"{mean:.2f}" if len(finite) == len(ratios) else f"{mean:.2f} ({len(finite)} of {len(ratios)})"


@dataclass(frozen=True, slots=True)
class Table:
    rows: Sequence[Row]
    models: Sequence[str]

    def of(self, case: str, model: str, name: str, objective: Aim = Aim.THROUGHPUT) -> Row:
        return next(
            row
            for row in self.rows
            if (row["case"], row["model"], row["strategy"], row["objective"]) == (case, model, name, objective.value)
        )

    def over(self, case: str, name: str, base: str, objective: Aim = Aim.THROUGHPUT) -> list[float]:
        """Return a strategy's throughput or value (by the objective) over the base's, by model; inf for a zero base."""
        figure = "value" if objective is Aim.VALUE else "throughput"
        pairs = [
            (self.of(case, model, name, objective)[figure], self.of(case, model, base, objective)[figure])
            for model in self.models
        ]
        return [one / other if other else math.inf for one, other in pairs]

    def best_other(self, case: str, model: str) -> Row:
        rows = [self.of(case, model, name) for name in SPOT]
        return max(rows, key=lambda row: float(row["throughput"]))


def _markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    for line in (heads, ["---"] * len(heads), *lines):
        print(f"| {' | '.join(line)} |")
    print()


def _show_made_up(table: Table, cases: Sequence[str]) -> None:
    """Print a table of each strategy's means over the models, for each rate of generated nodes."""
    heads = ["", *(head for case in cases for head in (f"{case}: samples/s", "value", "goodput"))]
    lines = []
    for name in NAMES:
        line = [name]
        for case in cases:
            goodput = statistics.fmean(table.of(case, model, name)["goodput"] for model in table.models)
            speed = _mean(table.over(case, name, "checkpoint"))
            value = _mean(table.over(case, name, ON_DEMAND, Aim.VALUE))
            line += [speed, value, f"{goodput:.3f}"]
        lines.append(line)
    _markdown(heads, lines)


def _show_cases(table: Table, cases: Sequence[str]) -> None:
    """Print two tables. For each case: the last model's nodes and losses, and mean ratios over the models. For each
    case and model: Bamboo's throughput relative to the bound, to `checkpoint` and to the best other strategy.
    """
    heads = [
        "",
        "Nodes",
        "Losses",
        "over the bound",
        "over checkpoint",
        "over the best other",
        "value over on-demand",
        "the same, objective: Value",
        "best other's",
    ]
    lines = []
    for case in cases:
        held = table.of(case, table.models[-1], OURS)
        best = {model: table.best_other(case, model)["throughput"] for model in table.models}
        ours = {model: table.of(case, model, OURS)["throughput"] for model in table.models}
        values = {name: table.over(case, name, ON_DEMAND, Aim.VALUE) for name in SPOT}
        others = [max(values[name][at] for name in SPOT) for at in range(len(table.models))]
        lines.append(
            [
                case,
                f"{held['nodes']:.1f}",
                f"{held['preemptions']:.0f}",
                _mean([_share(table, case, model) for model in table.models]),
                _mean(table.over(case, OURS, "checkpoint")),
                _mean(_ratios(ours, best)),
                _mean(table.over(case, OURS, ON_DEMAND, Aim.VALUE)),
                _mean(table.over(case, VALUED, ON_DEMAND, Aim.VALUE)),
                _mean(others),
            ]
        )
    _markdown(heads, lines)
    heads = ["Bamboo over its bound; over checkpoint; over the best other", *table.models]
    lines = []
    for case in cases:
        line = [case]
        for model in table.models:
            ours, best = table.of(case, model, OURS), table.best_other(case, model)
            speed, theirs = ours["throughput"], table.of(case, model, "checkpoint")["throughput"]
            parts = (_ratio(speed, ours["bound"]), _ratio(speed, theirs), _ratio(speed, best["throughput"]))
            line.append(f"{'; '.join(parts)} ({best['strategy']})")
        lines.append(line)
    _markdown(heads, lines)


def _share(table: Table, case: str, model: str) -> float:
    row = table.of(case, model, OURS)
    return row["throughput"] / row["bound"] if row["bound"] else math.inf


def _ratios(ours: Mapping[str, float], theirs: Mapping[str, float]) -> list[float]:
    return [ours[model] / theirs[model] if theirs[model] else math.inf for model in ours]


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}" if other else "–"


def _plot(table: Table, cases: Sequence[str], path: Path) -> None:
    """Plot each strategy's throughput relative to `checkpoint`, and its value relative to on-demand nodes."""
    from matplotlib.figure import Figure

    from bamboo.simulation.plots import COLOURS, GROUND, INK, SOFT

    names = [name for name in NAMES if name != ON_DEMAND]
    figure = Figure(figsize=(13, 6.4), facecolor=GROUND, layout="constrained")
    panels = (
        (Aim.THROUGHPUT, "checkpoint", "samples/s over checkpoint and restart"),
        (Aim.VALUE, ON_DEMAND, "samples per USD over on-demand nodes"),
    )
    for line, (objective, base, said) in enumerate(panels):
        for column, case in enumerate(cases):
            axes = figure.add_subplot(2, len(cases), line * len(cases) + column + 1)
            for place, (name, colour) in enumerate(zip(names, (*COLOURS, *MORE_COLOURS), strict=False)):
                heights = [one if math.isfinite(one) else 0.0 for one in table.over(case, name, base, objective)]
                at = [number + (place - len(names) / 2) * 0.08 for number in range(len(heights))]
                axes.bar(at, heights, 0.08, color=colour, label=name)
            axes.set_xticks(range(len(table.models)), table.models, fontsize=8, color=SOFT)
            axes.set_title(f"{said}, {case} hourly", fontsize=9, color=INK, loc="left")
            axes.tick_params(colors=SOFT, labelsize=8)
            axes.set_ylim(bottom=0)
            if line == column == 0:
                shown = axes.get_legend_handles_labels()
                in_two_lines = math.ceil(len(names) / 2)
                figure.legend(*shown, loc="outside lower center", ncols=in_two_lines, frameon=False, fontsize=8)
    figure.savefig(path, dpi=85)


if __name__ == "__main__":
    typer.run(run)
