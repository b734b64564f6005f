"""`bamboo simulate`, `plan` and `profile`: their flags and --help. Slow imports happen late."""

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from bamboo.cli.dispatch import job_of, print_table, usage
from bamboo.cli.output_files import Written, check_output_file, check_plot
from bamboo.jobs.options import PlanOptions, SimulateOptions
from bamboo.terminal.output_format import Output, OutputFormat
from bamboo_core.complaints import complain, system_reason
from bamboo_core.names import EXIT_FAILED
from bamboo_core.option_groups import grouped
from bamboo_core.storage.local_files import whole_file

MADE_UP = ("preempt_rate", "seeds", "replace_rate", "pattern", "notice", "zones")  # flags of made-up nodes
app = typer.Typer(rich_markup_mode=None)


def _refuse_made_up(ctx: typer.Context) -> None:
    """End the command if a flag for randomly generated preemptions was given in addition to --trace."""
    for name in MADE_UP:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            usage(f"--{name.replace('_', '-')}: cannot be combined with --trace")


@app.command()
@grouped
def simulate(
    ctx: typer.Context,
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="A BambooJob manifest.")],
    *,
    options: SimulateOptions,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the runs over time, as PNG.")] = None,
    events: Annotated[
        bool, typer.Option("--events", help="Print what happens on standard error; for one run.")
    ] = False,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Simulate a job's training under preemptions, in virtual time.

    The job's real coordinator makes the decisions; a profile gives the duration of everything else.

    Example: bamboo simulate job.yaml --profile profile.json --preempt-rate 0.1 --preempt-rate 0.5 --plot runs.png
    """
    from bamboo.jobs.errors import InvalidRequest
    from bamboo.jobs.simulating import simulated, spent_text
    from bamboo.simulation.figures import SimulationError
    from bamboo.terminal.simulation_table import simulation_json, simulation_table

    if options.trace:
        _refuse_made_up(ctx)
    check_plot("--plot", plot)
    try:
        found = simulated(job_of(job), options, say=(lambda line: print(line, file=sys.stderr)) if events else None)
    except InvalidRequest as error:
        usage(str(error))
    for warning in found.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if plot is not None:
        from bamboo.simulation.plots import draw

        try:
            draw([(one.name, one.runs) for one in found.by_case], f"{job.name} on {options.profile}", plot)
        except SimulationError as error:
            usage(str(error))
    cases = list(found.cases.items())
    if output is OutputFormat.JSON:
        typer.echo(simulation_json(cases, [[run.series for run in one.runs] for one in found.by_case]))
    else:
        print_table(lambda width: simulation_table(cases, width))
    for one in found.by_case:
        for text in sorted({run.message for run in one.runs if run.outcome not in ("cut", "Complete")}):
            ended = sum(run.message == text for run in one.runs)
            print(f"{one.name}: {ended} of {len(one.runs)} ended: {text}", file=sys.stderr)
        if text := spent_text(found.spec, one.runs):
            print(f"{one.name}: {text}", file=sys.stderr)


@app.command()
@grouped
def plan(
    ctx: typer.Context,
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="A BambooJob manifest.")],
    *,
    options: PlanOptions,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Recommend machines, grid and protection for a job, and estimate its time and cost in advance.

    Prints the Pareto-optimal plans, and for the recommended one the reasons and the changes to the manifest.

    Example: bamboo plan job.yaml --device a100,h100 --preempt-rate 0.1

    Example: bamboo plan job.yaml --prices prices.yaml --preempt-rate 0.1 --budget 500
    """
    from bamboo.jobs.errors import InvalidRequest
    from bamboo.jobs.planning import planned
    from bamboo.terminal.plan_table import document, plan_text

    if options.trace:
        _refuse_made_up(ctx)
    try:
        report, warnings = planned(job_of(job), options)
    except InvalidRequest as error:
        usage(str(error))
    for warning in warnings:
        complain(warning)
    if output is OutputFormat.JSON:
        print(document(report))
    else:
        print(plan_text(report, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    if report.found.chosen is None:
        complain(" ".join(report.reasons))
        raise typer.Exit(EXIT_FAILED)


MEGABYTE = 1e6
MOST_SECONDS = 1800.0


@app.command("profile")
def profile_job(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="A BambooJob manifest.")],
    output: Written = None,
    repeats: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=1000, help="Microbatches of each layer whose median counts."),
    ] = 10,
    seconds: Annotated[float, typer.Option(metavar="S", help="For measuring again what is not steady.")] = 60.0,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Compute instead what the layers take on a GPU that is not here, from a100 to v100.",
            show_default="measure on this machine",
        ),
    ] = None,
    flow: Annotated[
        float | None,
        typer.Option(
            metavar="MB/S",
            help="What one connection between two machines carries.",
            show_default="this machine's loopback",
        ),
    ] = None,
    machine: Annotated[
        float | None,
        typer.Option(metavar="MB/S", help="What all connections of a machine carry.", show_default="as --flow"),
    ] = None,
    start: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="From a node that is there until its worker is ready.",
            show_default="loading the task here",
        ),
    ] = None,
) -> None:
    """Measure the job's layers on this machine's device, and write a profile for `bamboo simulate` and `bamboo plan`.

    BAMBOO_DEVICE chooses the device. Flags give the network's speed and the start time of nodes.

    With --device, the command counts the layers' operations instead, and computes times from that GPU's figures.

    Example: bamboo profile job.yaml --flow 625 --machine 1250 --start 60 --output profile.json

    Example: bamboo profile job.yaml --device a100 --output a100.json
    """
    from bamboo.jobs.errors import InvalidRequest
    from bamboo.jobs.simulating import check_number
    from bamboo.local.trainer_calls.task_profile import count_task, measure_task, surrounded
    from bamboo.profiles.files import AT, read_profile
    from bamboo_core.planning.profile import ProfileError, to_json

    try:
        for name, value, most in (("--flow", flow, 1e6), ("--machine", machine, 1e6)):
            check_number(name, value, most)
        check_number("--start", start, 1e6, zero=True)
        check_number("--seconds", seconds, MOST_SECONDS, zero=True)
    except InvalidRequest as error:
        usage(str(error))
    if flow is not None and machine is not None and machine < flow:
        usage("--machine: expected at least --flow, since one connection cannot carry more than all")
    check_output_file("--output", output)
    source = job_of(job)
    try:
        if device is not None:
            found = read_profile(f"{AT}{device}", lambda: count_task(source))
        else:
            found = measure_task(source, repeats, seconds)
    except ProfileError as error:
        complain(error, str(job))
        raise typer.Exit(EXIT_FAILED) from None
    one, all_of_them = (None if rate is None else rate * MEGABYTE for rate in (flow, machine))
    found = surrounded(found, flow=one, machine=all_of_them, start=start)
    if output is None:
        sys.stdout.write(to_json(found).decode())
    else:
        try:
            with whole_file(output) as file:
                file.write(to_json(found))
        except OSError as error:
            complain(f"cannot write {output}: {system_reason(error)}")
            raise typer.Exit(EXIT_FAILED) from None
    if device is None and "layers.seconds" in found.estimated:
        typer.echo(f"warning: measure again on an idle machine: {found.sources['layers.seconds'].text}", err=True)
    forward, backward = (1000 * sum(getattr(x, kind) for x in found.layers) for kind in ("forward", "backward"))
    typer.echo(
        f"{len(found.layers)} layers on {found.device}: {forward + backward:.1f} ms a microbatch of {found.samples}"
        f" (forward {forward:.1f}, backward {backward:.1f}); estimated: {', '.join(found.estimated) or 'nothing'}",
        err=True,
    )
