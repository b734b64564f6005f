"""The options of `bamboo run` on this machine: names, --help and mistakes."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bamboo.cli.dispatch import job_of, usage
from bamboo.cli.output_files import check_is_path, check_output_file
from bamboo_core.complaints import complain
from bamboo_core.job.placement_spec import MOST_WORKERS_PER_NODE
from bamboo_core.names import HEARTBEAT_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from bamboo.job_source import JobSource
    from bamboo_core.job.spec import JobSpec

_Workers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Workers in the pipelines: a multiple of the job's stages, if it has a number of them.",
        show_default="the job's",
    ),
]
_Standby = Annotated[int | None, typer.Option(metavar="N", min=0, help="Spare workers.", show_default="the job's")]
_WorkersPerNode = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=MOST_WORKERS_PER_NODE,
        help="Workers of a node; they are taken away together.",
        show_default="the job's",
    ),
]
_Preempt = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WHEN",
        help="Take workers away: random:RATE (per minute), at:STEP[:STAGE][:notice] (in the middle of that step;"
        " the first one is 1), trace:FILE[:SPEEDUP] (recorded removals, played SPEEDUP times as fast),"
        " nodes:FILE[:SPEEDUP] (workers come and go with the recorded nodes) or none."
        " May be given several times.",
    ),
]
_Seed = Annotated[int, typer.Option(metavar="N", help="Seed of the random choices in --preempt.")]
_ReplaceAfter = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=0, help="Replace a worker that was taken away only after this time."),
]
_Verify = Annotated[
    bool,
    typer.Option("--verify", help="Run the job again undisturbed, on another grid, and compare the final bits."),
]
_Trace = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a trace of all workers, for Perfetto or chrome://tracing.")
]
_Profile = Annotated[
    str | None,
    typer.Option(
        metavar="FIRST:LAST",
        help="Run torch.profiler in these steps, the last one included; the files, for TensorBoard and Perfetto, are in"
        " --output.",
    ),
]
_Page = Annotated[
    bool | None,
    typer.Option(
        "--page/--no-page",
        help="Serve a web page of the run on this machine and print its URL.",
        show_default="on, except with --json and --quiet",
    ),
]
_PagePort = Annotated[
    int | None, typer.Option(metavar="PORT", min=1, max=65535, help="Port of that page.", show_default="any")
]
_Json = Annotated[bool, typer.Option("--json", help="Print only the summary, as JSON.")]
_Quiet = Annotated[bool, typer.Option("--quiet", help="Print only the summary.")]
_Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show what workers print and log on standard error."),
]
_Output = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Keep the trained weights, the workers' log and the run's page in this folder."),
]
_Checkpoints = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Where checkpoints are kept: a folder or a URL.",
        show_default="the job's",
    ),
]
_Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="End with the reason if checkpoints are there and none is of this training. Without it they are passed"
        " over, and the job begins at step 0.",
    ),
]
_HeartbeatTimeout = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=1.5, help="After this time without a heartbeat a worker is lost."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRunOptions:
    """The options of a local run as the user gave them. A mistake that a method finds ends the command."""

    workers: _Workers = None
    standby: _Standby = None
    workers_per_node: _WorkersPerNode = None
    preempt: _Preempt = None
    seed: _Seed = 0
    replace_after: _ReplaceAfter = 0.0
    verify: _Verify = False
    trace: _Trace = None
    profile: _Profile = None
    page: _Page = None
    page_port: _PagePort = None
    json: _Json = False
    quiet: _Quiet = False
    debug: _Debug = False
    output: _Output = None
    checkpoints: _Checkpoints = None
    resume: _Resume = False
    heartbeat_timeout: _HeartbeatTimeout = HEARTBEAT_TIMEOUT_SECONDS

    def job(self, path: Path) -> "JobSource":
        """Return the job with the options' values in it."""
        from bamboo.jobs.errors import InvalidRequest
        from bamboo.jobs.here import on_this_machine

        try:
            given = job_of(path, pods=False)
            found, warnings = on_this_machine(self._sized(given), checkpoints=self.checkpoints, resume=self.resume)
        except InvalidRequest as error:
            usage(*str(error).split("\n"))
        for warning in warnings:
            complain(warning)
        return found

    def _sized(self, job: "JobSource") -> "JobSource":
        """Return the job with the number of workers that the options set. Raises InvalidRequest."""
        from bamboo.jobs.here import changed

        given = job.document["spec"]
        if self.workers is not None and job.spec.elastic:
            elastic = {**given["elastic"], "maxWorkers": self.workers}
            job = changed(job, f"--workers {self.workers}", elastic=elastic)
        elif self.workers is not None:
            pipelines, rest = divmod(self.workers, job.spec.topology.stages)
            if rest:
                usage(f"--workers {self.workers}: expected a multiple of the job's {job.spec.topology.stages} stages")
            topology = {**given["topology"], "pipelines": pipelines}
            job = changed(job, f"--workers {self.workers}", topology=topology)
        if self.standby is not None:
            standby = {**(given.get("standby") or {}), "workers": self.standby}
            job = changed(job, f"--standby {self.standby}", standby=standby)
        if self.workers_per_node is not None:
            spread = {**(given.get("spread") or {}), "workersPerNode": self.workers_per_node}
            job = changed(job, f"--workers-per-node {self.workers_per_node}", spread=spread)
        return job

    def check(self) -> None:
        """Check the options before anything runs; a mistake ends the command."""
        if not math.isfinite(self.heartbeat_timeout):
            usage(f"--heartbeat-timeout {self.heartbeat_timeout}: expected a number of seconds")
        check_output_file("--trace", self.trace)
        if self.output is not None:
            check_is_path("--output", self.output, "a folder")
        if self.page is False and self.page_port is not None:
            usage("--page-port and --no-page: expected at most one of them")

    def profiled(self, spec: "JobSpec") -> tuple[int, int] | None:
        """Return the first and the last step in which torch.profiler runs."""
        from bamboo.jobs.errors import InvalidRequest
        from bamboo.jobs.here import profiled_steps

        try:
            return None if self.profile is None else profiled_steps(self.profile, spec, self.output)
        except InvalidRequest as error:
            usage(str(error))

    def check_checkpoints(self, spec: "JobSpec") -> bool:
        """Return whether checkpoints can be written, as far as is known before the run."""
        from bamboo.jobs.errors import InvalidRequest
        from bamboo.jobs.here import store_trouble

        try:
            trouble = store_trouble(spec, resume=self.resume)
        except InvalidRequest as error:
            usage(str(error))
        if trouble:
            complain(f"warning: {trouble}")
        return not trouble

    def served(self) -> int | None:
        """Return the port of the run's page, 0 for any; None for no page."""
        usual = self.page_port is not None or not (self.json or self.quiet)
        return (self.page_port or 0) if (usual if self.page is None else self.page) else None
