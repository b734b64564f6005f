"""The commands for jobs on a cluster: their flags and --help. Other modules, imported late, do the work."""

from pathlib import Path
from typing import Annotated

import typer

from bamboo.cli import options
from bamboo.cli.dispatch import check_job, job_of, run, targets_of, usage
from bamboo.cli.options import INTERVAL, WAIT, ClusterOptions, ClusterPlace
from bamboo.terminal.output_format import Output, OutputFormat
from bamboo_core.option_groups import grouped

app = typer.Typer(rich_markup_mode=None)
OperatorNamespace = Annotated[
    str | None,
    typer.Option("--operator-namespace", metavar="NAME", help="Namespace of the operator.", show_default="found"),
]


@app.command()
@grouped
def submit(
    cluster: ClusterOptions,
    file: Annotated[str, typer.Argument(metavar="JOB.yaml", help="A BambooJob manifest.", show_default=False)],
    apply: Annotated[bool, typer.Option("--apply", help="Merge the manifest into a job that exists.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --apply: also fields that others have set, such as kubectl edit.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only let the API server check the manifest.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show the job until it ends, and exit with its result.")
    ] = False,
    load: options.Load = True,
) -> None:
    """Submit a job to a cluster.

    The command first checks the manifest and tries the task on this machine. --no-load skips this trial, for example if
    the data are only in the image.
    """
    from bamboo.remote import changes

    if force and not apply:
        usage("--force: expected together with --apply")
    if dry_run and watch:
        usage("--dry-run creates no job that could be watched; leave out one of --dry-run and --watch")
    job = job_of(Path(file))
    check_job(job, load=load, quiet=cluster.quiet)
    run(
        cluster,
        lambda s: changes.submit(
            s, job, apply=apply, force=force, dry_run=dry_run, watch=watch, wanted_namespace=cluster.namespace
        ),
    )


@app.command("list")
@grouped
def list_jobs(
    cluster: ClusterOptions,
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="JOB", help="Only these jobs.", autocompletion=options.complete_jobs, show_default=False
        ),
    ] = None,
    everywhere: options.Everywhere = False,
    output: Output = OutputFormat.TEXT,
) -> None:
    """List jobs, a line each. `bamboo get` does the same."""
    from bamboo.remote import queries

    targets = targets_of(jobs or [])
    if everywhere and (jobs or cluster.namespace):
        usage("--all-namespaces: cannot be combined with JOB or --namespace")
    run(cluster, lambda s: queries.jobs(s, targets, everywhere=everywhere, form=output))


app.command("get", hidden=True)(list_jobs)


@app.command()
@grouped
def status(
    cluster: ClusterOptions,
    job: options.JobName,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it until the job ends, and exit with its result.")
    ] = False,
    interval: options.Interval = INTERVAL,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Show a job's progress.

    In the grid of pipelines and stages, * marks a worker that runs several stages.
    """
    from bamboo.remote import queries

    target = targets_of([job])[0]
    run(cluster, lambda s: queries.status(s, target, form=output, watch=watch, interval=interval))


@app.command()
@grouped
def events(
    cluster: ClusterOptions,
    job: options.JobName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job ends.")] = False,
    interval: options.Interval = INTERVAL,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Show what has happened to a job and its workers' pods, oldest first."""
    from bamboo.remote import queries

    target = targets_of([job])[0]
    run(cluster, lambda s: queries.events(s, target, form=output, follow=follow, interval=interval))


@app.command()
@grouped
def logs(
    cluster: ClusterPlace,
    job: options.JobName,
    workers: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORKER", help="Names of workers, such as w3.", show_default="all workers"),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing until they end; without WORKER, new ones too.")
    ] = False,
    since: Annotated[
        float | None, typer.Option("--since", parser=options.seconds, metavar="TIME", help="Only newer lines: 30s, 5m.")
    ] = None,
    tail: Annotated[
        int | None,
        typer.Option(
            "--tail",
            metavar="N",
            min=-1,
            help="Only the last N lines of each worker; -1: all.",
            show_default="all of one worker, 20 of several",
        ),
    ] = None,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="Only of workers that have ended and whose pods are kept.")
    ] = False,
    prefix: Annotated[bool, typer.Option("--prefix/--no-prefix", help="Print the worker's name first.")] = True,
) -> None:
    """Print the logs of a job's workers."""
    from bamboo.remote import logs as reading

    target, whole = targets_of([job])[0], None if since is None else max(1, round(since))
    run(
        cluster,
        lambda s: reading.logs(
            s, target, workers or [], follow=follow, since=whole, tail=tail, previous=previous, prefix=prefix
        ),
    )


@app.command()
@grouped
def suspend(
    cluster: ClusterOptions,
    job: options.JobName,
    yes: options.Yes = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the workers are gone.")] = False,
    timeout: options.Timeout = WAIT,
) -> None:
    """Stop a job and release its nodes.

    If it keeps checkpoints, `resume` goes on from its state; otherwise from step 0.
    """
    from bamboo.remote import changes

    target = targets_of([job])[0]
    run(cluster, lambda s: changes.suspend(s, target, yes=yes, wait=wait, timeout=timeout))


@app.command()
@grouped
def resume(
    cluster: ClusterOptions,
    job: options.JobName,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it trains.")] = False,
    timeout: options.Timeout = WAIT,
) -> None:
    """Start a suspended job again."""
    from bamboo.remote import changes

    target = targets_of([job])[0]
    run(cluster, lambda s: changes.resume(s, target, wait=wait, timeout=timeout))


@app.command()
@grouped
def delete(
    cluster: ClusterOptions,
    jobs: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB",
            help="Names, or files of manifests.",
            autocompletion=options.complete_jobs,
            show_default=False,
        ),
    ],
    yes: options.Yes = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the workers are gone.")] = True,
    timeout: options.Timeout = WAIT,
) -> None:
    """Delete jobs with their workers, after a confirmation if a job is not over."""
    from bamboo.remote import changes

    targets = targets_of(jobs)
    run(cluster, lambda s: changes.delete(s, targets, yes=yes, wait=wait, timeout=timeout))


@app.command()
@grouped
def preempt(
    cluster: ClusterOptions,
    job: options.JobName,
    worker: Annotated[str | None, typer.Option("--worker", metavar="NAME", help="This worker, such as w3.")] = None,
    stage: Annotated[int | None, typer.Option("--stage", metavar="N", min=0, help="The owner of this stage.")] = None,
    pipeline: Annotated[
        int | None, typer.Option("--pipeline", metavar="N", min=0, help="Pipeline of --stage.", show_default="0")
    ] = None,
    anyone: Annotated[bool, typer.Option("--random", help="Any worker that trains.")] = False,
    notice: Annotated[bool, typer.Option("--notice/--kill", help="With the pod's grace period, or without.")] = True,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the job is protected again.")] = True,
    timeout: options.Timeout = WAIT,
    yes: options.Yes = False,
) -> None:
    """Preempt a worker, as a drill, and report what happened."""
    from bamboo.remote import drill
    from bamboo.remote.victims import VictimChoice
    from bamboo_core.kube.errors import UsageError

    target = targets_of([job])[0]
    try:
        choice = VictimChoice(worker=worker, stage=stage, pipeline=pipeline, random=anyone)
    except UsageError as error:
        usage(str(error))
    run(cluster, lambda s: drill.drill(s, target, choice, kill=not notice, wait=wait, timeout=timeout, yes=yes))


@app.command()
@grouped
def page(
    cluster: ClusterOptions,
    job: options.JobName,
    port: Annotated[
        int,
        typer.Option("--port", metavar="PORT", min=0, max=65535, help="Port of the tunnel.", show_default="a free one"),
    ] = 0,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    service_account: Annotated[
        str,
        typer.Option(
            "--service-account",
            metavar="NAME",
            help="Whose token opens the page: a ServiceAccount in the operator's namespace.",
        ),
    ] = "bamboo-page",
    operator_namespace: OperatorNamespace = None,
) -> None:
    """Serve a job's page at a local URL, through a tunnel to the operator, until Ctrl-C.

    The printed URL has a token, which opens the pages of all jobs that the ServiceAccount may get.
    """
    from bamboo.remote import page as pages

    (target,) = targets_of([job])
    run(
        cluster,
        lambda s: pages.page(
            s,
            target,
            operator_namespace=operator_namespace,
            account=service_account,
            port=port,
            open_browser=open_browser,
        ),
    )


@app.command()
@grouped
def doctor(
    cluster: ClusterOptions,
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="Also what this job needs: its name, or the file of its manifest.",
            autocompletion=options.complete_jobs,
            show_default=False,
        ),
    ] = None,
    operator_namespace: OperatorNamespace = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Look for problems that may keep a job from starting: versions, rights, the operator, quotas, the queue, nodes.

    It changes nothing. A problem is printed with its remedy, if known; the exit code is 1 if there is a problem.
    """
    from bamboo.remote import doctor as diagnosing
    from bamboo_core.kube.errors import UsageError

    target = targets_of([job])[0] if job else None
    try:
        file = diagnosing.manifest_of_file(job)
    except UsageError as error:
        usage(str(error))
    run(cluster, lambda s: diagnosing.doctor(s, target, file, operator_namespace=operator_namespace, form=output))
