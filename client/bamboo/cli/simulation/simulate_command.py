"""`bamboo simulate`: its flags and --help. Slow imports happen late."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bamboo.cli.dispatch import refuse_beside, usage
from bamboo.cli.output_files import check_plot
from bamboo.cli.simulation.job_file import job_of
from bamboo.jobs.simulate_options import SimulateOptions
from bamboo.terminal.output_format import Output, OutputFormat
from bamboo_core.option_groups import grouped

if TYPE_CHECKING:
    from bamboo.terminal.simulation_table import Case

app = typer.Typer(rich_markup_mode=None)
NOT_BESIDE_TRACE = ("preempt_rate", "seeds", "replace_rate", "notice", "zones")


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
    """Train a job in virtual time under preemptions.

    The job's own coordinator decides; a profile says how long everything takes.

    Example: bamboo simulate job.yaml --profile profile.json --preempt-rate 0.1 --preempt-rate 0.5 --plot runs.png
    """
    from bamboo.jobs.errors import InvalidRequest
    from bamboo.jobs.simulating import simulated, spent_text
    from bamboo.simulation.figures import SimulationError
    from bamboo.terminal.simulation_table import over_time_document

    if options.trace:
        refuse_beside(ctx, NOT_BESIDE_TRACE, "--trace")
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
    over_time = [over_time_document([run.series for run in one.runs]) for one in found.by_case]
    _print(cases, over_time, output)
    for one in found.by_case:
        for text in sorted({run.message for run in one.runs if run.outcome not in ("cut", "Complete")}):
            ended = sum(run.message == text for run in one.runs)
            print(f"{one.name}: {ended} of {len(one.runs)} ended: {text}", file=sys.stderr)
        if text := spent_text(found.spec, one.runs):
            print(f"{one.name}: {text}", file=sys.stderr)


def _print(cases: "list[Case]", over_time: list[dict[str, Any]], form: OutputFormat) -> None:
    """Print the results. over_time: of each case, for JSON."""
    from rich.console import Console

    from bamboo.terminal.simulation_table import simulation_documents, simulation_table

    if form is OutputFormat.JSON:
        typer.echo(json.dumps(simulation_documents(cases, over_time), indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 1000)
        console.print(simulation_table(cases, console.width))
