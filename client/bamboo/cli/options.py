"""Options that several commands share. Every command imports this module, so it imports nothing slow."""

from dataclasses import dataclass
from typing import Annotated

import typer

from bamboo.terminal.time_flag import seconds


def complete_jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete names of jobs on the cluster; the shell itself completes names of files."""
    from bamboo.cli.completion import job_names

    return job_names(incomplete, *(ctx.params.get(name) for name in ("namespace", "context", "kubeconfig")))


JobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="A job's name, or the file of its manifest.",
        autocompletion=complete_jobs,
        show_default=False,
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Everywhere = Annotated[bool, typer.Option("--all-namespaces", "-A", help="Jobs of all namespaces.")]
Interval = Annotated[
    float,
    typer.Option("--interval", parser=seconds, metavar="TIME", help="Time between two updates.", show_default="2s"),
]
Timeout = Annotated[float, typer.Option("--timeout", parser=seconds, metavar="TIME", help="Maximum time to wait.")]
Load = Annotated[
    bool, typer.Option("--load/--no-load", help="Try the task on this machine first, as `bamboo validate --load` does.")
]

INTERVAL = 2.0
WAIT = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlace:
    """The cluster and namespace of a command."""

    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", metavar="NAME", help="Namespace of the job.", show_default="the context's"),
    ] = None
    context: Annotated[
        str | None,
        typer.Option("--context", metavar="NAME", help="Context of the kubeconfig.", show_default="the current one"),
    ] = None
    kubeconfig: Annotated[
        str | None,
        typer.Option("--kubeconfig", metavar="FILE", help="Kubeconfig to use.", show_default="$KUBECONFIG"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions(ClusterPlace):
    """The cluster and namespace of a command, and how much it prints."""

    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result and errors.")] = False
