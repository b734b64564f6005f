"""The options of `bamboo run` as given. Every `bamboo` command imports this module, so it imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bamboo_core.job.placement_spec import MOST_WORKERS_PER_NODE
from bamboo_core.names import HEARTBEAT_TIMEOUT_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRunOptions:
    """The user's options of a local run: flags of `bamboo run`, and arguments of `Job.run`."""

    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Workers in the pipelines: a multiple of the job's stages, if it has a number of them.",
            show_default="the job's",
        ),
    ] = None
    standby: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Spare workers.", show_default="the job's")
    ] = None
    workers_per_node: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=MOST_WORKERS_PER_NODE,
            help="Workers of a node; they are taken away together.",
            show_default="the job's",
        ),
    ] = None
    preempt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHEN",
            help="Take workers away: random:RATE (per minute), at:STEP[:STAGE][:notice] (in the middle of that step;"
            " the first one is 1), trace:FILE[:SPEEDUP] (recorded removals, played SPEEDUP times as fast),"
            " nodes:FILE[:SPEEDUP] (workers come and go with the recorded nodes) or none."
            " May be given several times.",
        ),
    ] = None
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the random choices in --preempt.")] = 0
    replace_after: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="Replace a worker that was taken away only after this time."),
    ] = 0.0
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace of all workers, for Perfetto or chrome://tracing."),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Keep the trained weights, the workers' log and the run's page in this folder."
        ),
    ] = None
    checkpoints: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where checkpoints are kept: a folder or a URL.",
            show_default="the job's",
        ),
    ] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="End with the reason if checkpoints are there and none is of this training. Without it they are passed"
            " over, and the job begins at step 0.",
        ),
    ] = False
    heartbeat_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=1.5, help="After this time without a heartbeat a worker is lost."),
    ] = HEARTBEAT_TIMEOUT_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """The user's choice of what `bamboo run` shows, and whether it verifies the result."""

    verify: Annotated[
        bool,
        typer.Option("--verify", help="Run the job again undisturbed, on another grid, and compare the final bits."),
    ] = False
    page: Annotated[
        bool | None,
        typer.Option(
            "--page/--no-page",
            help="Serve a web page of the run on this machine and print its URL.",
            show_default="on, except with --json and --quiet",
        ),
    ] = None
    page_port: Annotated[
        int | None, typer.Option(metavar="PORT", min=1, max=65535, help="Port of that page.", show_default="any")
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print only the summary, as JSON.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the summary.")] = False
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show what workers print and log on standard error."),
    ] = False

    @property
    def port(self) -> int | None:
        """The port of the run's page; 0 for any free port, None for no page."""
        usual = self.page_port is not None or not (self.json or self.quiet)
        return (self.page_port or 0) if (usual if self.page is None else self.page) else None
