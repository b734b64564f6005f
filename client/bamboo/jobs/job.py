"""`bamboo.Job`: a job that a program builds, checks, plans, simulates, runs and submits."""

import copy
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from bamboo import background
from bamboo.job_source import JobSource, source_of_file, source_of_manifest
from bamboo.jobs.entrypoint import entrypoint_of
from bamboo.jobs.errors import InvalidJob, InvalidRequest
from bamboo.jobs.handle import JobHandle
from bamboo.jobs.here import Validation, prepared, validated
from bamboo.jobs.local_job import LocalJob
from bamboo.jobs.options import PlanOptions, SimulateOptions
from bamboo.jobs.plan import JobPlan
from bamboo.jobs.planning import planned
from bamboo.jobs.simulating import SimulatedRuns, simulated
from bamboo.local.run_options import LocalRunOptions
from bamboo.local.runner import RunOptions
from bamboo_core.job.budget_reach import HOUR
from bamboo_core.job.manifest import ManifestError
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.yaml_file import source_of
from bamboo_core.names import API_VERSION, ENV_LAUNCH, KIND

_FLAG: Final = re.compile(r"--([a-z][a-z-]*)")


class Job:
    """A BambooJob, checked when it is built: InvalidJob lists all mistakes."""

    def __init__(
        self,
        name: str,
        *,
        task: Mapping[str, Any] | Callable[..., Any] | str,
        config: Mapping[str, Any] | None = None,
        namespace: str | None = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        **parts: Any,
    ) -> None:
        """Build a job. parts: sections of the manifest's spec, named and shaped as in YAML (docs/api.md).

        task: the function that builds the task, its "module:function", or the section spec.task. config: that
        function's argument. labels, annotations: the cluster object's metadata. Raises InvalidJob, InvalidRequest.
        """
        folder: Path | None = None
        task_part: dict[str, Any]
        if callable(task):
            entrypoint, folder = entrypoint_of(task)
            task_part = {"entrypoint": entrypoint}
        else:
            task_part = {"entrypoint": task} if isinstance(task, str) else {**task}
        if config is not None:
            task_part["config"] = dict(config)
        metadata = {"name": name, "namespace": namespace, "labels": labels, "annotations": annotations}
        document = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {key: value for key, value in metadata.items() if value is not None},
            "spec": {"task": task_part, **parts},
        }
        folders = (folder, Path.cwd()) if folder is not None else (Path.cwd(),)
        read = source_of(f"job {name}", _yaml(document))
        self._source = _source(lambda: source_of_manifest(replace(read, lines={}), folders))

    @classmethod
    def from_file(cls, path: str | Path) -> "Job":
        """Read a job from a manifest file. Raises InvalidJob, whose problems name file and line."""
        return cls.from_source(_source(lambda: source_of_file(str(path))))

    @classmethod
    def from_source(cls, source: JobSource) -> "Job":
        """Return the job of an already parsed manifest."""
        job = cls.__new__(cls)
        job._source = source
        return job

    @property
    def name(self) -> str:
        return self._source.spec.name

    @property
    def spec(self) -> JobSpec:
        """The job's spec, with all defaults."""
        return self._source.spec

    @property
    def source(self) -> JobSource:
        """The parsed manifest, with the folders of the task's modules."""
        return self._source

    @property
    def document(self) -> dict[str, Any]:
        """A copy of the manifest, as `kubectl apply` takes it."""
        return copy.deepcopy(self._source.document)

    def to_yaml(self) -> str:
        """Return the manifest as YAML; for a job that was read from a file, the file's text with its comments."""
        return self._source.text

    def changed(self, **parts: Any) -> "Job":
        """Return a copy with some fields changed: `changed(training={"steps": 6})`. None removes a field or section.

        Raises InvalidJob, InvalidRequest.
        """
        document = self.document
        for name, part in parts.items():
            before = document["spec"].get(name)
            if isinstance(part, Mapping) and isinstance(before, Mapping):
                document["spec"][name] = {**before, **part}
            else:
                document["spec"][name] = part
        read = replace(source_of(f"job {self.name}", _yaml(document)), lines={})
        return self.from_source(_source(lambda: source_of_manifest(read, self._source.folders)))

    def validate(self, *, load: bool = False) -> Validation:
        """Return warnings about the job; with load, also build its task here and report the memory that workers need.

        Raises BambooError if the task cannot be used. Without bamboo-trainer, `told` says that it was not checked.
        """
        return validated(self._source, load=load)

    def plan(
        self,
        *,
        device: str | Sequence[str] = (),
        trace: str | Path | Sequence[str | Path] = (),
        deadline: float | None = None,
        **options: Any,
    ) -> JobPlan:
        """Search for the best machines, grid and protection, and their cost, like `bamboo plan`.

        deadline: hours. options: other flags of the command, such as preempt_rate=0.1. Raises InvalidRequest.
        """
        wanted = PlanOptions(
            device=",".join(_listed(device)) or None,
            trace=_listed(trace),
            deadline=None if deadline is None else deadline * HOUR,
            quiet=True,
            **options,
        )
        with _arguments_named():
            return JobPlan(self._source, *planned(self._source, wanted))

    def simulate(
        self,
        *,
        trace: str | Path | Sequence[str | Path] = (),
        preempt_rate: float | Sequence[float] = (),
        seeds: int | range = 10,
        **options: Any,
    ) -> SimulatedRuns:
        """Run the job in virtual time, under recorded or randomly generated preemptions, like `bamboo simulate`.

        seeds: a number of seeds, or a range without gaps. options: other flags of the command, such as
        profile="p.json". Raises InvalidRequest.
        """
        one = seeds if isinstance(seeds, range) else range(1, seeds + 1)
        if one.step != 1:
            raise InvalidRequest(f"seeds {seeds}: expected a range without gaps")
        wanted = SimulateOptions(
            trace=_listed(trace),
            preempt_rate=list(preempt_rate) if isinstance(preempt_rate, Sequence) else [preempt_rate],
            seeds=f"{one.start}:{one.stop - 1}",
            quiet=True,
            **options,
        )
        with _arguments_named():
            return simulated(self._source, wanted)

    def run(
        self,
        *,
        output: str | Path | None = None,
        preempt: str | Sequence[str] = (),
        trace: str | Path | None = None,
        page: bool = True,
        **options: Any,
    ) -> JobHandle:
        """Start the job on this machine, one process per worker, like `bamboo run`, and return at once.

        options: other flags of the command, such as checkpoints="ck". The job ends with this program. Raises
        BambooError.
        """
        if ENV_LAUNCH in os.environ:
            raise InvalidRequest(
                "the module of this task runs a job when it is imported; put run() below if __name__ == '__main__':"
            )
        wanted = LocalRunOptions(
            output=None if output is None else Path(output),
            preempt=_listed(preempt),
            trace=None if trace is None else Path(trace),
            **options,
        )
        with _arguments_named():
            job, run, warnings = prepared(self._source, wanted)
        for warning in warnings:
            _warn(warning)
        return background.call(_begun(job, run, 0 if page else None))

    def submit(
        self,
        *,
        namespace: str | None = None,
        context: str | None = None,
        kubeconfig: str | None = None,
        apply: bool = False,
        force: bool = False,
    ) -> JobHandle:
        """Create the job on a cluster, like `bamboo submit --no-load` with the same flags, and return at once.

        The job goes on when this program ends. Raises ClusterError, InvalidRequest.
        """
        from bamboo.jobs.client import Client  # slow to import

        client = Client(namespace=namespace, context=context, kubeconfig=kubeconfig)
        return client.submit(self, apply=apply, force=force)

    def __repr__(self) -> str:
        topology = self.spec.topology
        fixed = f"{topology.pipelines} x {topology.stages}"
        grid = "the grid is chosen" if self.spec.elastic else fixed
        return f"<Job {self.name}: {self.spec.task.entrypoint}, {grid}>"


async def _begun(source: JobSource, options: RunOptions, page: int | None) -> JobHandle:
    job = LocalJob(source, options, page)
    job.start()
    return JobHandle(job)


def _source(read: Callable[[], JobSource]) -> JobSource:
    try:
        return read()
    except ManifestError as error:
        raise InvalidJob(error.problems) from None


@contextmanager
def _arguments_named() -> Iterator[None]:
    """Convert the block's ValueError to InvalidRequest, with arguments' names instead of flags in its message."""
    try:
        yield
    except ValueError as error:
        raise InvalidRequest(_as_arguments(str(error))) from None


def _as_arguments(text: str) -> str:
    return _FLAG.sub(lambda found: found[1].replace("-", "_"), text)


def _listed(given: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(given)] if isinstance(given, str | Path) else list(map(str, given))


def _yaml(document: dict[str, Any]) -> str:
    """Return the document as YAML. Raises InvalidRequest for a value that plain YAML cannot represent."""
    try:
        return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as error:
        raise InvalidRequest(f"expected numbers, texts, lists and mappings, as in YAML: {error}") from None


def _warn(text: str) -> None:
    warnings.warn(_as_arguments(text), stacklevel=3)
