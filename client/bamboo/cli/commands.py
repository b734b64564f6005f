"""The `bamboo` command line: `run` and `validate`, and the commands of the other modules of this package."""

import contextlib
import logging
import sys
from dataclasses import replace
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated

import typer

from bamboo import stop_signals
from bamboo.cli import checkpoint_commands
from bamboo.cli.cluster_commands import app as cluster_commands
from bamboo.cli.dispatch import job_of, usage
from bamboo.cli.history_command import app as history_command
from bamboo.cli.init_command import app as init_command
from bamboo.cli.output_files import check_is_path, check_output_file
from bamboo.cli.simulation_commands import app as simulation_commands
from bamboo.cli.tokenize_command import app as tokenize_command
from bamboo.local.run_options import LocalRunOptions, ReportOptions
from bamboo_core import standard_streams
from bamboo_core.complaints import SilentErrorsNamed, complain
from bamboo_core.names import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from bamboo_core.option_groups import grouped
from bamboo_core.text import count

app = typer.Typer(
    help="Train large PyTorch models on spot nodes without losing a step.",
    epilog="Exit codes: 0 complete; 1 failed; 2 wrong flag or manifest; 3 not recoverable; 130 stopped by the user.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
PROGRAM = "bamboo"
Job = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="A BambooJob manifest.")]


def main() -> None:
    """Run the console script and exit. A signal ends it without a traceback; a job sets its own signal handlers."""
    stop_signals.end_by_exception()
    standard_streams.prepare()
    try:
        app(prog_name=PROGRAM)
    except standard_streams.OutputLost as error:
        sys.exit(standard_streams.end(EXIT_FAILED, error))
    except SystemExit as ending:
        if isinstance(ending.code, int | None):
            sys.exit(standard_streams.end(ending.code or EXIT_OK))
        raise


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(distribution_version("bamboo-spot"))
        raise typer.Exit


@app.callback()
def main_options(
    shown: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
@grouped
def run(
    job: Job,
    *,
    local: LocalRunOptions,
    report: ReportOptions,
) -> None:
    """Run the job on this machine, one process per worker. `bamboo submit` runs it on a cluster."""
    from bamboo.jobs.here import prepared  # imported here, so that --help and errors appear at once
    from bamboo.local.session import train

    check_output_file("--trace", local.trace)
    if local.output is not None:
        check_is_path("--output", local.output, "a folder")
    if report.page is False and report.page_port is not None:
        usage("--page-port and --no-page: expected at most one of them")
    try:
        source, options, warnings = prepared(job_of(job), local)
    except ValueError as error:
        usage(*str(error).split("\n"))
    for warning in warnings:
        complain(f"warning: {warning}")
    if report.debug:
        options = replace(options, show_log=_print_log)
    standard_streams.go_on_without_reader()
    _log_on_standard_error()
    raise typer.Exit(train(source, options, report))


@app.command()
def validate(
    jobs: Annotated[
        list[Path], typer.Argument(metavar="JOB.yaml...", help="BambooJob manifests; - is standard input.")
    ],
    load: Annotated[
        bool,
        typer.Option("--load", help="Also load the task, build its layers without values and count what they need."),
    ] = False,
) -> None:
    """Check manifests, and report every mistake with its line.

    With --load, also check whether the task can be built and evaluated here, and estimate its workers' memory.

    For a job with spec.budget.money, also print how long the money lasts.
    """
    from bamboo.job_source import source_of_file
    from bamboo.jobs.errors import BambooError
    from bamboo.jobs.here import validated
    from bamboo_core.job.budget_reach import of_manifest
    from bamboo_core.job.manifest import ManifestError
    from bamboo_core.job.spec import whole_workers

    wrong = False
    for job in jobs:
        try:
            source = source_of_file(str(job))
            found = validated(source, load=load)
        except (ManifestError, BambooError) as error:
            wrong = True
            for problem in error.problems if isinstance(error, ManifestError) else [error]:
                complain(str(problem))
            continue
        spec = source.spec
        topology, devices = spec.topology, spec.worker.devices
        each = f" of {devices} devices" if devices > 1 else ""
        grid = f"{topology.pipelines} x {topology.stages} workers"
        if spec.elastic:
            grid = f"a grid of at most {count(whole_workers(spec), 'worker')}"
        typer.echo(
            f"{job}: {spec.name} is valid: {grid}{each} and {spec.standby.workers} standby, {spec.training.length}"
        )
        for warning in found.warnings:
            typer.echo(f"  warning: {warning}")
        if money := of_manifest(spec):
            typer.echo(f"  {money}")
        for line in found.told if load else (NOT_LOADED,):
            typer.echo(f"  {line}")
    if wrong:
        raise typer.Exit(EXIT_USAGE)


# Here, so that --help shows them in this order.
app.registered_commands += init_command.registered_commands
app.registered_commands += cluster_commands.registered_commands
app.registered_commands += history_command.registered_commands
app.registered_commands += checkpoint_commands.app.registered_commands
app.registered_commands += tokenize_command.registered_commands
app.registered_commands += simulation_commands.registered_commands


def _print_log(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the job continues without a reader
        sys.stderr.write(text)


def _log_on_standard_error() -> None:
    handler = logging.StreamHandler()
    handler.addFilter(SilentErrorsNamed())
    logging.basicConfig(level=logging.ERROR, format="bamboo: %(message)s", handlers=[handler])


NOT_LOADED = "not checked: whether the task loads, and how much memory it needs (--load checks that)"
