"""`bamboo research`: the published Bamboo simulator. What takes time to import is imported late."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from bamboo.cli.dispatch import usage
from bamboo.cli.simulation.case_options import (
    NodeOptions,
    OutputOptions,
    check_hours,
    print_cases,
    rates_of,
    seeds_of,
)
from bamboo_core.option_groups import grouped

if TYPE_CHECKING:
    from bamboo.simulation.research.cost_model import ResearchOptions
    from bamboo.simulation.research.research_workloads import Workload
    from bamboo.terminal.simulation_table import Case

app = typer.Typer(rich_markup_mode=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResearchFlags:
    """The flags of the research model as the user gave them."""

    workload: Annotated[
        str, typer.Option(metavar="NAME", help="gpt-2, bert, resnet, gnmt, vgg or alexnet, with its published grid.")
    ] = "bert"
    stages: Annotated[
        int | None, typer.Option(metavar="P", help="Stages; for bert also 8 and 15.", show_default="the workload's")
    ] = None
    seeds: Annotated[
        str, typer.Option(metavar="N|A:B", help="Number of seeds, from 1 on; or the seeds from A to B.")
    ] = "100"
    start_hour: Annotated[
        int, typer.Option(metavar="H", min=0, max=23, help="Hour of the day at which runs begin.")
    ] = 0
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Steps of a run.", show_default="the workload's, without --hours"),
    ] = None
    hours: Annotated[
        float | None, typer.Option(metavar="H", help="Cut runs after this time.", show_default="the trace's")
    ] = None
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


@app.command()
@grouped
def research(ctx: typer.Context, *, nodes: NodeOptions, options: ResearchFlags, shown: OutputOptions) -> None:
    """Run the published Bamboo simulator (NSDI 2023), with its step times and its random draws.

    Of Bamboo itself these figures say nothing.

    Example: bamboo research --workload bert --preempt-rate 0.1 --preempt-rate 0.5 --seeds 1000
    """
    from bamboo.simulation.figures import SimulationError
    from bamboo.simulation.research.research_workloads import workload_of
    from bamboo_core.traces.trace import NodeTraceError

    rates = rates_of(ctx, nodes, ("start_hour",))
    try:
        workload = workload_of(options.workload, options.stages)
        if nodes.trace:
            cases = _traced(workload, nodes.trace, options)
        else:
            cases = _made_up(workload, rates, options, quiet=shown.quiet)
    except (SimulationError, NodeTraceError) as error:
        usage(str(error))
    print_cases(cases, shown.output)


def _traced(workload: "Workload", recordings: list[str], options: ResearchFlags) -> "list[Case]":
    from bamboo.simulation.figures import spread
    from bamboo.simulation.research.research_runs import simulate_trace
    from bamboo.traces.files import read_nodes

    if len(recordings) > 1:
        usage("--trace: expected one recording, since the published simulator knows no prices")
    trace = read_nodes(recordings)
    wanted = _wanted(workload, options, trace.duration / 3600)
    return [(os.path.basename(recordings[0]), spread([simulate_trace(workload, trace, wanted)]))]


def _made_up(workload: "Workload", rates: tuple[float, ...], options: ResearchFlags, *, quiet: bool) -> "list[Case]":
    from bamboo.simulation.figures import spread
    from bamboo.simulation.research.research_runs import ResearchRun, simulate_all
    from bamboo.terminal.run_progress import RunProgress

    wanted, seeds = _wanted(workload, options, None), seeds_of(options.seeds)
    runs = [
        ResearchRun(workload=workload, seed=seed, rate=rate, start_hour=options.start_hour, options=wanted)
        for rate in rates
        for seed in seeds
    ]
    with RunProgress(len(runs), shown=not quiet) as progress:
        found = list(simulate_all(runs, options.jobs or os.cpu_count() or 1, progress.done))
    size = len(seeds)
    return [(f"{rate:g}", spread(found[at * size : (at + 1) * size])) for at, rate in enumerate(rates)]


def _wanted(workload: "Workload", options: ResearchFlags, duration: float | None) -> "ResearchOptions":
    """The options of the research model that the flags ask for. duration: hours, of a trace. A run ends after its steps
    or its time, whichever is first.

    With --hours alone only time ends it, as it ends runs of the published program: these have no steps then.
    """
    from bamboo.simulation.research.cost_model import KnownBug, ResearchOptions

    known = [bug.value for bug in KnownBug]
    for name in options.without_bug or []:
        if name not in known:
            usage(f"--without-bug must be one of {', '.join(known)}, not {name!r}")
    hours = options.hours if options.hours is not None else duration
    check_hours(hours)
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
