"""The command line: `bamboo run JOB.yaml`, `bamboo validate JOB.yaml`, `bamboo version`."""

import asyncio
import copy
import logging
import sys
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from bamboo import manifest as manifests
from bamboo.events import Outcome
from bamboo.local import preempt as preemption
from bamboo.local.metrics import MetricsView
from bamboo.local.pool import PoolError
from bamboo.local.runner import Options, run_job
from bamboo.local.summary import Summary, compare, to_json, to_text
from bamboo.local.view import LiveView, PlainView, QuietView, View, Views
from bamboo.names import EXIT_FAILED, EXIT_USAGE, HEARTBEAT_TIMEOUT_SECONDS
from bamboo.spec import JobSpec

app = typer.Typer(
    help="Train large models on spot nodes and lose nothing.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Job = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="A BambooJob manifest.")]


def main() -> None:
    app()


@app.command()
def run(
    job: Job,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Workers in the pipelines: a multiple of the job's stages.")
    ] = None,
    standby: Annotated[int | None, typer.Option(min=0, help="Spare workers.")] = None,
    preempt: Annotated[
        list[str] | None,
        typer.Option(
            help="none, random:RATE (per minute), at:STEP[:STAGE][:notice] or trace:FILE[:SPEEDUP]. Repeatable."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the preemptions' random choices.")] = 0,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run it again undisturbed and compare the final state.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome/Perfetto trace to this file.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Serve Prometheus metrics on this port.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print only the summary, as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the summary.")] = False,
    output: Annotated[Path | None, typer.Option(help="Folder for the trained weights and the workers' log.")] = None,
    heartbeat_timeout: Annotated[
        float, typer.Option(min=0.5, help="Seconds of silence after which a worker is lost.")
    ] = HEARTBEAT_TIMEOUT_SECONDS,
) -> None:
    """Run the job on this machine, one process per worker."""
    logging.basicConfig(level=logging.ERROR, format="%(name)s: %(message)s")
    spec, document = _load(job, workers, standby)
    try:
        schedule = preemption.parse(preempt or [], seed=seed)
        preemption.check(schedule, steps=spec.training.steps, stages=spec.topology.stages)
    except ValueError as error:
        _usage(str(error))
    _check_paths(trace, output)
    options = Options(preempt=schedule, output=output, trace=trace, heartbeat_timeout=heartbeat_timeout)

    def view() -> View:
        shown = _view(spec.name, quiet=quiet or json)
        return Views(shown, MetricsView(spec.name, metrics_port)) if metrics_port else shown

    summary = _run(spec, document, options, view())
    if not json:
        typer.echo(to_text(summary))
    equal = None
    if verify and summary.outcome is Outcome.COMPLETE:
        if not json:
            typer.echo("the same job again, undisturbed:")
        again = _run(spec, document, Options(heartbeat_timeout=heartbeat_timeout, undisturbed=True), view())
        if again.outcome is not Outcome.COMPLETE:
            typer.echo(to_text(again), err=True)
            raise typer.Exit(again.exit_code)
        equal = compare(summary.digests, again.digests)
        if not json:
            typer.echo(f"bit-equal: {'yes' if equal else 'no'}")
    if json:
        typer.echo(to_json(summary, **({} if equal is None else {"bit_equal": equal})))
    raise typer.Exit(EXIT_FAILED if equal is False else summary.exit_code)


@app.command()
def validate(job: Job) -> None:
    """Check a manifest and name everything that is wrong with it."""
    spec, _ = _load(job, None, None)
    topology = spec.topology
    typer.echo(
        f"{job}: {spec.name} is valid: {topology.pipelines} x {topology.stages} workers"
        f" and {spec.standby.workers} standby, {spec.training.steps} steps"
    )


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(distribution_version("bamboo"))


def _load(path: Path, workers: int | None, standby: int | None) -> tuple[JobSpec, dict[str, Any]]:
    """The job, and its document with the flags' values in it."""
    try:
        document = copy.deepcopy(manifests._load(str(path)))
        spec = manifests.parse_manifest(document)
        if workers is not None:
            pipelines, rest = divmod(workers, spec.topology.stages)
            if rest:
                _usage(f"--workers {workers}: expected a multiple of the job's {spec.topology.stages} stages")
            document["spec"]["topology"]["pipelines"] = pipelines
        if standby is not None:
            document["spec"]["standby"] = {**(document["spec"].get("standby") or {}), "workers": standby}
        return manifests.parse_manifest(document), document
    except manifests.ManifestError as error:
        _usage(str(error))


def _run(spec: JobSpec, document: dict[str, Any], options: Options, view: View) -> Summary:
    try:
        return asyncio.run(run_job(spec, document, options, view))
    except (PoolError, OSError) as error:
        typer.echo(f"bamboo: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(130) from None


def _view(job: str, *, quiet: bool) -> View:
    if quiet:
        return QuietView()
    if sys.stdout.isatty() and sys.stdin.isatty():
        return LiveView(job, Console())
    return PlainView(lambda line: print(line, flush=True))


def _check_paths(trace: Path | None, output: Path | None) -> None:
    if trace is not None and (trace.is_dir() or not trace.absolute().parent.is_dir()):
        _usage(f"--trace {trace}: expected a file in an existing folder")
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _usage(f"--output {output}: {error.strerror}")


def _usage(message: str) -> NoReturn:
    typer.echo(f"bamboo: {message}", err=True)
    raise typer.Exit(EXIT_USAGE)
