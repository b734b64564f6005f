"""Helpers that commands share: reading manifests, naming jobs, tables, usage errors. Slow imports happen late."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from bamboo.cli.options import ClusterPlace
from bamboo_core.complaints import complain
from bamboo_core.names import EXIT_USAGE

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bamboo.job_source import JobSource
    from bamboo.remote.session import Command, Target


def run(cluster: ClusterPlace, command: "Command") -> NoReturn:
    from bamboo.remote import session

    raise typer.Exit(session.run(command, **asdict(cluster)))


def targets_of(given: list[str]) -> "list[Target]":
    """Parse arguments that name jobs on a cluster: names or manifest files. An invalid one ends the command."""
    from bamboo.remote.session import target
    from bamboo_core.kube.errors import RemoteError

    try:
        return [target(one) for one in given]
    except RemoteError as error:
        usage(str(error))


def usage(*messages: str) -> NoReturn:
    """Print messages about a wrong flag or manifest, and end the command with EXIT_USAGE."""
    for message in messages:
        complain(message)
    raise typer.Exit(EXIT_USAGE)


def print_table(table: Callable[[int], "RenderableType"]) -> None:
    """Print a table as wide as the terminal, or 1000 columns wide without a terminal. table: builds it for a width."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 1000)
    console.print(table(console.width))


def check_job(job: "JobSource", *, load: bool, quiet: bool) -> None:
    """Print a job's warnings, unless quiet. load: also load and describe its task; a failure ends the command."""
    from bamboo.jobs.errors import BambooError
    from bamboo.jobs.here import validated

    def say(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr)

    if load:
        say("trying the task on this machine (--no-load skips this)")
    try:
        found = validated(job, load=load)
    except BambooError as error:
        usage(f"{error} (--no-load submits the job without trying its task here)")
    for line in (*(f"warning: {warning}" for warning in found.warnings), *found.told):
        say(line)


def job_of(path: Path) -> "JobSource":
    """Read a job from a manifest file (`source_of_file`). A mistake in the file ends the command."""
    from bamboo.job_source import source_of_file
    from bamboo_core.job.manifest import ManifestError

    try:
        return source_of_file(str(path))
    except ManifestError as error:
        usage(*map(str, error.problems))
