"""`bamboo rollout ...`: flags and --help. The work is in `bamboo.remote.rollout`, imported late."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from bamboo.cli import options
from bamboo.cli.dispatch import run, targets_of
from bamboo.cli.options import ClusterOptions
from bamboo_core.option_groups import grouped

WAIT = 3600.0

rollouts = typer.Typer(
    help="Follow, hold and undo the replacement of a job's workers after a change of `worker`.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@rollouts.command()
@grouped
def status(
    cluster: ClusterOptions,
    job: options.JobName,
    watch: Annotated[bool, typer.Option("--watch/--no-watch", help="Wait until it is over.")] = True,
    timeout: options.Timeout = WAIT,
) -> None:
    """Show how many workers are replaced. Exit code 1 if it stalls."""
    from bamboo.remote import rollout

    target = targets_of([job])[0]
    run(cluster, lambda s: rollout.status(s, target, watch=watch, timeout=timeout))


@rollouts.command()
@grouped
def pause(cluster: ClusterOptions, job: options.JobName) -> None:
    """Replace no more workers until `resume`. Sets spec.rollout.paused."""
    from bamboo.remote import rollout

    target = targets_of([job])[0]
    run(cluster, lambda s: rollout.set_paused(s, target, paused=True))


@rollouts.command()
@grouped
def resume(cluster: ClusterOptions, job: options.JobName) -> None:
    """Go on after `pause`. A rollout that had stalled is tried again."""
    from bamboo.remote import rollout

    target = targets_of([job])[0]
    run(cluster, lambda s: rollout.set_paused(s, target, paused=False))


@rollouts.command()
@grouped
def restart(cluster: ClusterOptions, job: options.JobName) -> None:
    """Replace all workers one after the other, although nothing has changed."""
    from bamboo.remote import rollout

    target = targets_of([job])[0]
    run(cluster, lambda s: rollout.restart(s, target, datetime.now(UTC)))


@rollouts.command()
@grouped
def history(cluster: ClusterOptions, job: options.JobName) -> None:
    """List the job's different `worker` sections, oldest first."""
    from bamboo.remote import rollout

    target = targets_of([job])[0]
    run(cluster, lambda s: rollout.history(s, target))


@rollouts.command()
@grouped
def undo(
    cluster: ClusterOptions,
    job: options.JobName,
    to: Annotated[
        int | None,
        typer.Option("--to-revision", metavar="N", min=0, help="As `history` has it.", show_default="the one before"),
    ] = None,
) -> None:
    """Go back to an earlier `worker` section."""
    from bamboo.remote import rollout

    target = targets_of([job])[0]
    run(cluster, lambda s: rollout.undo(s, target, to=to))
