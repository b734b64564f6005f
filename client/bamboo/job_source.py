"""A job's source: a file or a program, with its name in errors and the folders of its modules."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bamboo_core.job.manifest import Problem, parse_source, read_job
from bamboo_core.job.pod_templates import unknown_in_template
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.yaml_file import ManifestSource


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSource:
    """A job and its source.

    name: in errors. folders: where the task's modules are searched first. text: the manifest as written. unknown:
    fields of its pod template that the known Kubernetes versions do not have.
    """

    name: str
    spec: JobSpec
    document: dict[str, Any]
    folders: tuple[Path, ...]
    text: str
    unknown: tuple[Problem, ...]


def source_of_file(path: str, *, pods: bool = True) -> JobSource:
    """Return the job of a manifest's file; - is standard input. Raises ManifestError, whose problems name file and
    line.

    The task's modules are searched in the manifest's folder, as for a script, then in the current one. pods: whether
    unknown fields of the pod template are mistakes, too.
    """
    manifest, spec = read_job(path, unknown_in_template) if pods else read_job(path)
    return _made(manifest, spec, (Path(path).resolve().parent, Path.cwd()))


def source_of_manifest(manifest: ManifestSource, folders: tuple[Path, ...]) -> JobSource:
    """Return the job of a parsed manifest, like `source_of_file` without pods. Raises ManifestError."""
    return _made(manifest, parse_source(manifest), folders)


def _made(manifest: ManifestSource, spec: JobSpec, folders: tuple[Path, ...]) -> JobSource:
    return JobSource(
        name=manifest.name,
        spec=spec,
        document=copy.deepcopy(manifest.document),
        folders=folders,
        text=manifest.text,
        unknown=tuple(map(manifest.place, unknown_in_template(spec))),
    )
