"""`bamboo simulate`: its flags and what it says in --help. What takes time to import is imported late."""

import json
import os
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bamboo.cli.dispatch import refuse_beside, usage
from bamboo.cli.output_files import check_plot
from bamboo.job.text_patterns import DATE_TIME
from bamboo.terminal.option_groups import grouped

if TYPE_CHECKING:
    from bamboo.simulation.research.cost_model import ResearchOptions
    from bamboo.simulation.research.research_workloads import Workload
    from bamboo.terminal.simulation_table import Case

app = typer.Typer(rich_markup_mode=None)
MOST_SEEDS = 1_000_000
OF_A_JOB = ("profile", "replace_rate", "notice", "zones", "price", "begin", "zone_traffic_price", "plot", "events")
NOT_BESIDE_TRACE = ("preempt_rate", "seeds", "start_hour", "replace_rate", "notice", "zones")
OF_RESEARCH = ("workload", "stages", "start_hour", "without_bug")
NOT_OF_STRATEGIES = (
    "model",
    "stages",
    "start_hour",
    "steps",
    "notice",
    "zones",
    "price",
    "begin",
    "plot",
    "events",
    "without_bug",
    "jobs",
)


class SimulationModel(StrEnum):
    """What decides how long a step takes, and what a preemption costs."""

    JOB = "job"
    RESEARCH = "research"


class SimulationFormat(StrEnum):
    """In which form results are printed."""

    TEXT = "text"
    JSON = "json"
    CSV = "csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """As the user gave them."""

    strategy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Compare published ways to train on such nodes, under the same assumptions: on-demand, checkpoint,"
            " checkpoint-blocking, torchrun-elastic, torchrun-fixed,"
            " morphing, templates, rerouting, memory-checkpoints, quorum, bamboo or all. May be given several times.",
        ),
    ] = None
    workload: Annotated[
        str, typer.Option(metavar="NAME", help="gpt-2, bert, resnet, gnmt, vgg or alexnet, with its published grid.")
    ] = "bert"
    stages: Annotated[
        int | None, typer.Option(metavar="P", help="Stages; for bert also 8 and 15.", show_default="the workload's")
    ] = None
    preempt_rate: Annotated[
        list[float] | None,
        typer.Option(
            metavar="P",
            help="Probability that a node is taken away within an hour. May be given several times.",
        ),
    ] = None
    trace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Instead a recording of nodes, of any form of docs/traces.md. For a job it may be given several times,"
            " for instance with a recording of prices.",
        ),
    ] = None
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N|A:B",
            help="Number of seeds, from 1 on; or the seeds from A to B.",
            show_default="100, or 10 for a job, or 5 with --strategy",
        ),
    ] = None
    start_hour: Annotated[
        int, typer.Option(metavar="H", min=0, max=23, help="Hour of the day at which runs begin.")
    ] = 0
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Steps of a run.", show_default="the job's; the workload's, without --hours"
        ),
    ] = None
    hours: Annotated[
        float | None,
        typer.Option(metavar="H", help="Cut runs after this time.", show_default="the trace's; 24 for a job"),
    ] = None
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME",
            help="Of a job or --strategy: what `bamboo profile` wrote, a profile that comes with Bamboo, or @NAME of a"
            " GPU, for the job's own layers there (docs/simulator.md).",
        ),
    ] = None
    replace_rate: Annotated[
        float,
        typer.Option(
            metavar="P",
            help="Of a job or --strategy: probability that a node that was taken away is replaced within an hour.",
        ),
    ] = 0.5
    notice: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Of a job: notice before made-up preemptions.", show_default="none"),
    ] = None
    zones: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Of a job: zones of made-up nodes, with commas.",
            show_default="those that the job names, else zone-a",
        ),
    ] = None
    price: Annotated[
        float | None,
        typer.Option(
            metavar="USD",
            help="Of a job: price of a spot node and hour.",
            show_default="the trace's, else the job's, else the profile's",
        ),
    ] = None
    begin: Annotated[
        str | None,
        typer.Option(
            metavar="DATE",
            help="Of a job with spec.budget.doneBy: date and time at which runs begin, such as 2026-12-24T18:00:00Z.",
            show_default="now",
        ),
    ] = None
    zone_traffic_price: Annotated[
        float,
        typer.Option(
            metavar="USD",
            help="Of a job or --strategy: price of a GB that crosses zones, each way; 0 if the cloud bills none.",
        ),
    ] = 0.01
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Of a job: draw the runs over time, as PNG.")] = None
    events: Annotated[
        bool, typer.Option("--events", help="Of a job: print what happens on standard error; for one run.")
    ] = False
    without_bug: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Leave a known bug of the published simulator out: double-rendezvous, phantom-standby,"
            " standby-slowdown or mean-of-ratios. May be given several times.",
        ),
    ] = None
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes.", show_default="as many as processors")
    ] = None
    output: Annotated[SimulationFormat, typer.Option("--output", "-o", help="Output format.")] = SimulationFormat.TEXT
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False


@app.command()
@grouped
def simulate(
    ctx: typer.Context,
    job: Annotated[Path | None, typer.Argument(metavar="[JOB.yaml]", help="A BambooJob manifest.")] = None,
    model: Annotated[
        SimulationModel | None,
        typer.Option(
            help="job: the real coordinator, on what a profile says. research: the published simulator's.",
            show_default="job, if there is one",
        ),
    ] = None,
    *,
    options: SimulateOptions,
) -> None:
    """Train in virtual time under preemptions: throughput, cost and value, without paying for a node.

    A job is run by the coordinator and the plans that would run it; how long everything takes says a profile, which
    `bamboo profile` measures. Without a job, --model research is the published Bamboo simulator, with its step times
    and its random draws. docs/simulator.md says how closely both agree with what is known.

    Example: bamboo simulate job.yaml --profile profile.json --preempt-rate 0.1 --preempt-rate 0.5 --plot runs.png

    Example: bamboo simulate --model research --workload bert --preempt-rate 0.1 --preempt-rate 0.5 --seeds 1000

    With --strategy it compares Bamboo's own coordinator with models of other systems' policies, for a published
    model (--workload) or for a job with its profile.

    Example: bamboo simulate --strategy all --workload bert --preempt-rate 0.1 --preempt-rate 0.33
    """
    if options.trace:
        refuse_beside(ctx, NOT_BESIDE_TRACE, "--trace")
    if options.strategy:
        _simulate_strategies(ctx, job, options)
        return
    chosen = model or (SimulationModel.JOB if job is not None else None)
    if chosen is None:
        usage("expected JOB.yaml, or --model research")
    _check_flags(ctx, chosen)
    if chosen is SimulationModel.JOB:
        _simulate_job(job, options)
        return
    if job is not None:
        usage("--model research: expected no job, since it has workloads of its own")
    from bamboo.simulation.figures import SimulationError
    from bamboo.simulation.research.research_workloads import workload_of
    from bamboo.traces.trace import NodeTraceError

    try:
        workload = workload_of(options.workload, options.stages)
        cases = _traced(workload, options) if options.trace is not None else _made_up(workload, options)
    except (SimulationError, NodeTraceError) as error:
        usage(str(error))
    _print(cases, options.output)


def _traced(workload: "Workload", options: SimulateOptions) -> "list[Case]":
    from bamboo.simulation.figures import spread
    from bamboo.simulation.pool import simulate_trace
    from bamboo.traces.files import read_nodes

    assert options.trace is not None
    if len(options.trace) > 1:
        usage("--trace: expected one with --model research")
    trace = read_nodes(options.trace)
    wanted = _wanted(workload, options, trace.duration / 3600)
    return [(os.path.basename(options.trace[0]), spread([simulate_trace(workload, trace, wanted)]))]


def _made_up(workload: "Workload", options: SimulateOptions) -> "list[Case]":
    from bamboo.cli.simulation.run_progress import RunProgress
    from bamboo.simulation.figures import spread
    from bamboo.simulation.pool import ResearchRun, simulate_all

    rates = _rates(options)
    wanted = _wanted(workload, options, None)
    seeds = _seeds(options.seeds or "100")
    runs = [
        ResearchRun(workload=workload, seed=seed, rate=rate, start_hour=options.start_hour, options=wanted)
        for rate in rates
        for seed in seeds
    ]
    with RunProgress(len(runs), shown=not options.quiet) as progress:
        found = list(simulate_all(runs, options.jobs or os.cpu_count() or 1, progress.done))
    size = len(seeds)
    return [(f"{rate:g}", spread(found[at * size : (at + 1) * size])) for at, rate in enumerate(rates)]


def _rates(options: SimulateOptions) -> list[float]:
    rates = options.preempt_rate or []
    if not rates:
        usage("--preempt-rate or --trace: expected one of them")
    for rate in rates:
        if not 0 <= rate <= 1:
            usage(f"--preempt-rate {rate:g}: expected a probability from 0 to 1")
    return rates


def _check_flags(ctx: typer.Context, model: SimulationModel) -> None:
    """A flag that means nothing with this model is refused, not ignored."""
    refuse_beside(ctx, OF_A_JOB if model is SimulationModel.RESEARCH else OF_RESEARCH, f"--model {model.value}")


def _simulate_strategies(ctx: typer.Context, job: Path | None, options: SimulateOptions) -> None:
    from bamboo.cli.simulation.run_progress import RunProgress
    from bamboo.cli.simulation.simulate_strategies import Comparison, compare, runs

    refuse_beside(ctx, NOT_OF_STRATEGIES, "--strategy")
    if job is not None:
        refuse_beside(ctx, ("workload",), "JOB.yaml")
        if options.profile is None:
            usage(f"--profile: expected what `bamboo profile {job}` writes")
    _check_numbers(options)
    wanted = Comparison(
        job=job,
        strategies=tuple(options.strategy or ()),
        workload=options.workload,
        profile=options.profile,
        traces=tuple(options.trace or ()),
        rates=() if options.trace else tuple(_rates(options)),
        seeds=_seeds(options.seeds or "5"),
        hours=options.hours,
        replace_rate=options.replace_rate,
        zone_price=options.zone_traffic_price,
    )
    with RunProgress(runs(wanted), shown=not options.quiet) as progress:
        cases = compare(wanted, progress.done)
    _print(cases, options.output)


def _simulate_job(job: Path | None, options: SimulateOptions) -> None:
    from bamboo.cli.simulation.run_progress import RunProgress
    from bamboo.cli.simulation.simulate_job import JobSimulation, budget_told, job_run, simulate
    from bamboo.simulation.figures import SimulationError, spread
    from bamboo.terminal.simulation_table import over_time_document

    if job is None:
        usage("--model job: expected JOB.yaml")
    if options.profile is None:
        from bamboo.profiles.files import shipped_names

        known = ", ".join(shipped_names())
        usage(f"--profile: expected a file that `bamboo profile {job}` writes, or one of {known}")
    _check_numbers(options)
    check_plot("--plot", options.plot)
    wanted = JobSimulation(
        job=job,
        profile=options.profile,
        traces=tuple(options.trace or ()),
        rates=() if options.trace else tuple(_rates(options)),
        seeds=_seeds(options.seeds or "10"),
        hours=options.hours,
        steps=options.steps,
        replace_rate=options.replace_rate,
        notice=options.notice,
        zones=() if options.zones is None else tuple(zone.strip() for zone in options.zones.split(",")),
        price=options.price,
        zone_price=options.zone_traffic_price,
        jobs=options.jobs,
        begin=_begin(options.begin),
    )
    say = (lambda line: print(line, file=sys.stderr)) if options.events else None
    run = job_run(wanted)
    results = simulate(
        wanted, run, say, lambda runs, about: RunProgress(runs, about, shown=runs > 0 and not options.quiet)
    )
    if options.plot is not None:
        from bamboo.simulation.plots import draw

        try:
            draw(results, f"{job.name} on {options.profile}", options.plot)
        except SimulationError as error:
            usage(str(error))
    cases = [(name, spread([one.figures for one in runs])) for name, runs in results]
    over_time = [over_time_document([one.series for one in runs]) for _, runs in results]
    _print(cases, options.output, over_time)
    for name, runs in results:
        for text in sorted({one.message for one in runs if one.outcome not in ("cut", "Complete")}):
            print(f"{name}: {sum(one.message == text for one in runs)} of {len(runs)} ended: {text}", file=sys.stderr)
        for text in budget_told(run.spec, wanted.begin, runs):
            print(f"{name}: {text}", file=sys.stderr)


def _begin(text: str | None) -> datetime:
    """Now, if nothing is said."""
    if text is None:
        return datetime.now(UTC)
    if not DATE_TIME.fits(text):
        usage(f"--begin {text[:40]!r}: expected {DATE_TIME.said}")
    return datetime.fromisoformat(text)


def _check_numbers(options: SimulateOptions) -> None:
    if options.hours is not None and not 0 < options.hours <= 87_600:
        usage(f"--hours must be more than 0 and at most 87600, not {options.hours:g}")
    if not 0 <= options.replace_rate <= 1:
        usage(f"--replace-rate {options.replace_rate:g}: expected a probability from 0 to 1")
    if options.notice is not None and not 0 <= options.notice <= 86_400:
        usage(f"--notice {options.notice:g}: expected seconds from 0 to 86400")
    if not 0 <= options.zone_traffic_price <= 1000:
        usage(f"--zone-traffic-price {options.zone_traffic_price:g}: expected USD from 0 to 1000")
    if options.price is not None and not 0 <= options.price <= 1e6:
        usage(f"--price {options.price:g}: expected USD from 0 to 1000000")


def _wanted(workload: "Workload", options: SimulateOptions, duration: float | None) -> "ResearchOptions":
    """duration: hours, of a trace. A run ends after its steps or its time, whichever is first.

    With --hours alone only time ends it, as it ends runs of the published program: these have no steps then.
    """
    from bamboo.simulation.research.cost_model import KnownBug, ResearchOptions

    known = [bug.value for bug in KnownBug]
    for name in options.without_bug or []:
        if name not in known:
            usage(f"--without-bug must be one of {', '.join(known)}, not {name!r}")
    hours = options.hours if options.hours is not None else duration
    if hours is not None and not 0 < hours <= 87_600:
        usage(f"--hours must be more than 0 and at most 87600, not {hours:g}")
    steps = options.steps
    if steps is None and options.hours is None:
        steps = workload.steps
    if steps is None and hours is None:
        usage(f"--steps or --hours: expected one of them, since no number of steps is known for {workload.name}")
    return ResearchOptions(
        steps=steps,
        milliseconds=None if hours is None else round(hours * 3_600_000),
        fixed=frozenset(KnownBug(name) for name in options.without_bug or []),
    )


def _seeds(text: str) -> range:
    first, colon, last = text.partition(":")
    numbers = [first, last] if colon else ["1", first]
    if not all(number.isascii() and number.isdigit() and len(number) < 10 for number in numbers):
        usage(f"--seeds must be a number of seeds or A:B, not {text[:40]!r}")
    seeds = range(int(numbers[0]), int(numbers[1]) + 1)
    if not 1 <= len(seeds) <= MOST_SEEDS:
        usage(f"--seeds must name from 1 to {MOST_SEEDS} seeds, not {text[:40]!r}")
    return seeds


def _print(cases: "list[Case]", form: SimulationFormat, over_time: "list[dict[str, Any]] | None" = None) -> None:
    from rich.console import Console

    from bamboo.terminal.simulation_table import simulation_csv, simulation_documents, simulation_table

    if form is SimulationFormat.JSON:
        typer.echo(json.dumps(simulation_documents(cases, over_time), indent=2))
    elif form is SimulationFormat.CSV:
        typer.echo(simulation_csv(cases), nl=False)
    else:
        console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 1000)
        console.print(simulation_table(cases, console.width))
