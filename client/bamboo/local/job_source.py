"""A job as it is given: by a file or by a program, with what its errors call it and where its modules are."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bamboo.local.trainer_calls.task_check import module_folders
from bamboo_core.job.manifest import parse_source, read_job
from bamboo_core.job.pod_fields import unknown_in_template
from bamboo_core.job.runtime import Runtime, parse_source_with
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.yaml_file import ManifestSource, source_of


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSource:
    """A job, and where it comes from.

    name: what errors call it. folders: where the task's modules are looked for first. text: the manifest as it is
    written.
    """

    name: str
    spec: JobSpec
    document: dict[str, Any]
    folders: tuple[Path, ...]
    text: str


def source_of_file(path: str, *, pods: bool = True, runtime: Runtime | None = None) -> JobSource:
    """The job of a manifest's file; - is standard input. Raises ManifestError, whose problems name file and line.

    pods: fields of the pod template that no Kubernetes is known to have are mistakes, too. runtime: the one that the
    job names, with which it is read; without, only what the job says is judged.
    """
    manifest, spec = read_job(path, unknown_in_template) if pods else read_job(path)
    source = _made(manifest, spec, module_folders(Path(path)))
    return source if runtime is None else with_runtime(source, runtime)


def with_runtime(job: JobSource, runtime: Runtime) -> JobSource:
    """The job that was read without its runtime, with it. Raises ManifestError."""
    document, spec = parse_source_with(source_of(job.name, job.text), runtime, unknown_in_template)
    return replace(job, document=document, spec=spec)


def source_of_manifest(manifest: ManifestSource, folders: tuple[Path, ...]) -> JobSource:
    """The job of a manifest that was read, as `source_of_file` has it without pods. Raises ManifestError."""
    return _made(manifest, parse_source(manifest), folders)


def _made(manifest: ManifestSource, spec: JobSpec, folders: tuple[Path, ...]) -> JobSource:
    return JobSource(
        name=manifest.name,
        spec=spec,
        document=copy.deepcopy(manifest.document),
        folders=folders,
        text=manifest.text,
    )
