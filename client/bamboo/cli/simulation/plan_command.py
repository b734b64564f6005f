"""`bamboo plan`: its flags and --help. Slow imports happen late."""

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from bamboo.cli.dispatch import refuse_beside, usage
from bamboo.cli.simulation.job_file import job_of
from bamboo.jobs.plan_options import PlanOptions
from bamboo.terminal.output_format import Output, OutputFormat
from bamboo_core.complaints import complain
from bamboo_core.names import EXIT_FAILED
from bamboo_core.option_groups import grouped

app = typer.Typer(rich_markup_mode=None)
NOT_BESIDE_TRACE = ("preempt_rate", "replace_rate", "pattern", "zones", "notice")


@app.command()
@grouped
def plan(
    ctx: typer.Context,
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="A BambooJob manifest.")],
    *,
    options: PlanOptions,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Find out which machines, grid and protection a job should have, and what it will cost, before paying.

    Prints the Pareto-optimal plans, the recommended one with what to change in the manifest, and why.

    Example: bamboo plan job.yaml --device a100,h100 --preempt-rate 0.1
    Example: bamboo plan job.yaml --prices prices.yaml --preempt-rate 0.1 --budget 500
    """
    from bamboo.jobs.errors import InvalidRequest
    from bamboo.jobs.planning import planned
    from bamboo.terminal.plan_table import document, plan_text

    if options.trace:
        refuse_beside(ctx, NOT_BESIDE_TRACE, "--trace")
    try:
        found = planned(job_of(job), options)
    except InvalidRequest as error:
        usage(str(error))
    for warning in found.warnings:
        complain(warning)
    report = found.report
    if output is OutputFormat.JSON:
        print(document(report))
    else:
        print(plan_text(report, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    if report.found.chosen is None:
        complain(" ".join(report.reasons))
        raise typer.Exit(EXIT_FAILED)
