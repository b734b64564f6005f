"""The options of `bamboo run` on this machine: what each is called, what --help says, and what is wrong with them."""

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from bamboo.cli.dispatch import usage
from bamboo.cli.output_files import check_is_path
from bamboo_core.complaints import complain, system_reason
from bamboo_core.job.placement_spec import MOST_WORKERS_PER_NODE
from bamboo_core.names import HEARTBEAT_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from bamboo_core.checkpoint.store import CheckpointStore
    from bamboo_core.job.spec import JobSpec

_LOOK_SECONDS: Final = 20.0  # for each look into the store before anything is started

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
_MetricsPort = Annotated[
    int | None,
    typer.Option(metavar="PORT", min=1, max=65535, help="Serve Prometheus metrics on this machine's PORT."),
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
    bool | None,
    typer.Option(
        "--resume/--no-resume",
        help="Go on from the newest checkpoint, or begin at step 0. With --resume checkpoints of another training are"
        " an error; without, they are passed over.",
        show_default="the job's",
    ),
]
_HeartbeatTimeout = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=1.5, help="After this time without a heartbeat a worker is lost."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRunOptions:
    """The options of a local run as the user gave them. A mistake that a method finds ends the command with a
    sentence.
    """

    workers: _Workers = None
    standby: _Standby = None
    workers_per_node: _WorkersPerNode = None
    preempt: _Preempt = None
    seed: _Seed = 0
    replace_after: _ReplaceAfter = 0.0
    verify: _Verify = False
    trace: _Trace = None
    metrics_port: _MetricsPort = None
    page: _Page = None
    page_port: _PagePort = None
    json: _Json = False
    quiet: _Quiet = False
    debug: _Debug = False
    output: _Output = None
    checkpoints: _Checkpoints = None
    resume: _Resume = None
    heartbeat_timeout: _HeartbeatTimeout = HEARTBEAT_TIMEOUT_SECONDS

    def job(self, path: Path) -> tuple["JobSpec", dict[str, Any]]:
        """The job, and its document with the options' values in it."""
        from bamboo_core.job.budget_reach import past
        from bamboo_core.job.manifest import ManifestError, read_manifest

        try:
            spec, document = read_manifest(str(path))
        except ManifestError as error:
            usage(*map(str, error.problems))
        if spec.suspend:
            usage("spec.suspend: the job is suspended; set it to false to run the job")
        if self.workers is not None and spec.topology.chooses_stages:
            elastic = {**(document["spec"].get("elastic") or {}), "maxWorkers": self.workers}
            document["spec"]["elastic"] = elastic
            spec = _parse(document, f"--workers {self.workers}")
        elif self.workers is not None:
            pipelines, rest = divmod(self.workers, spec.topology.stages)
            if rest:
                usage(f"--workers {self.workers}: expected a multiple of the job's {spec.topology.stages} stages")
            document["spec"]["topology"]["pipelines"] = pipelines
            spec = _parse(document, f"--workers {self.workers}")
        if self.standby is not None:
            document["spec"]["standby"] = {**(document["spec"].get("standby") or {}), "workers": self.standby}
            spec = _parse(document, f"--standby {self.standby}")
        if self.workers_per_node is not None:
            spread = {**(document["spec"].get("spread") or {}), "workersPerNode": self.workers_per_node}
            document["spec"]["spread"] = spread
            spec = _parse(document, f"--workers-per-node {self.workers_per_node}")
        if spec.budget is not None and spec.budget.money is not None:
            complain("spec.budget.money has no effect here: nobody is paid for workers on this machine")
        if told := past(spec, datetime.now(UTC)):
            complain(told)
        return self._with_checkpoints(spec, document)

    def _with_checkpoints(self, spec: "JobSpec", document: dict[str, Any]) -> tuple["JobSpec", dict[str, Any]]:
        """A volume claim is not here: without a URL of its own such a job keeps no checkpoints on this machine."""
        claimed = spec.checkpoint is not None and spec.checkpoint.storage.claim_name is not None
        if self.checkpoints is None and self.resume is None and not claimed:
            return spec, document
        part = dict(document["spec"].get("checkpoint") or {})
        if self.checkpoints is not None:
            url = self.checkpoints if "://" in self.checkpoints else Path(self.checkpoints).absolute().as_uri()
            part["storage"] = {"uri": url}
        elif claimed:
            complain("the job's volume claim is not here: no checkpoints are kept (--checkpoints)")
            part = {}
        if self.resume is not None:
            if not part:
                usage("--resume: the job keeps no checkpoints; --checkpoints URL says where they are")
            part["resume"] = "Latest" if self.resume else "Never"
        document["spec"]["checkpoint"] = part or None
        return _parse(document, "--checkpoints"), document

    def check(self) -> None:
        """What can be said before anything is run."""
        if not math.isfinite(self.heartbeat_timeout):
            usage(f"--heartbeat-timeout {self.heartbeat_timeout}: expected a number of seconds")
        for flag, path, expected in (("--trace", self.trace, "a file"), ("--output", self.output, "a folder")):
            if path is not None:
                check_is_path(flag, path, expected)
        if self.trace is not None and (self.trace.is_dir() or not self.trace.absolute().parent.is_dir()):
            usage(f"--trace {self.trace}: expected a file in an existing folder")
        if self.output is not None:
            _check_output(self.output)
        if self.page is False and self.page_port is not None:
            usage("--page-port and --no-page: expected at most one of them")

    def check_checkpoints(self, spec: "JobSpec") -> bool:
        """Whether checkpoints can be written, as far as that can be told now. That they cannot is a warning, for the
        store may come back, but a mistake where nothing but them could save the job.

        Who says --resume does not want to begin at step 0 because nothing that is there fits the job any more.
        """
        url = spec.checkpoint.storage.uri if spec.checkpoint is not None else None
        if url is None:
            return True
        from bamboo_core.checkpoint.store import CheckpointStore
        from bamboo_core.storage.bounded import StoreLimits
        from bamboo_core.storage.errors import StorageError

        try:
            store = CheckpointStore(url, StoreLimits(seconds=_LOOK_SECONDS, tries=1))
            if self.resume:
                _check_resumption(store, spec)
            store.probe()
        except StorageError as error:
            if not _survives_losses(spec):
                usage(f"no checkpoint can be kept, and nothing else could save this job: {error}")
            complain(f"warning: no checkpoint can be kept, or looked for, as long as this lasts: {error}")
            return False
        return True

    def served(self) -> int | None:
        """The port of the run's page, 0 for any; None for no page."""
        usual = self.page_port is not None or not (self.json or self.quiet)
        return (self.page_port or 0) if (usual if self.page is None else self.page) else None


def _check_resumption(store: "CheckpointStore", spec: "JobSpec") -> None:
    """Raises StorageError: the job waits for a store that does not answer, and says why."""
    from bamboo_core.checkpoint.resume import choose
    from bamboo_core.job.edits import numbers_digest

    steps = None if spec.training.until else spec.training.steps
    choice = choose(store.list(), numbers_digest(spec), steps=steps)
    if choice.manifest is None and choice.passed:
        attempt, reason = choice.passed[0]
        told = f"that of step {attempt.step} cannot be used: {reason}"
        usage(f"--resume: {store.shown} has no checkpoint of this job; {told}; --no-resume begins at step 0")


def _survives_losses(spec: "JobSpec") -> bool:
    """Is there anybody else who holds the state of a stage: a replica, or another pipeline?"""
    from bamboo_core.job.spec import RedundancyMode, whole_workers

    redundant = spec.redundancy.mode is not RedundancyMode.NONE
    if spec.topology.chooses_stages:
        return spec.elastic.min_pipelines > 1 or (redundant and whole_workers(spec) > 1)
    return (redundant and spec.topology.stages > 1) or spec.topology.pipelines > 1


def _parse(document: dict[str, Any], source: str) -> "JobSpec":
    """The spec of a document. A mistake ends the command. source: what a mistake is blamed on."""
    from bamboo_core.job.manifest import ManifestError, parse_manifest

    try:
        return parse_manifest(document)
    except ManifestError as error:
        usage(*(f"{source}: {problem}" for problem in error.problems))


def _check_output(folder: Path) -> None:
    """Makes it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept = any((folder / "weights").glob("*"))
    except OSError as error:
        usage(f"--output {folder}: {system_reason(error)}")
    if kept:
        usage(f"--output {folder}: it holds the weights of another run; expected a new or empty folder")
