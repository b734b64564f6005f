"""A job as it is given: by a file or by a program, with what its errors call it and where its modules are."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bamboo.local.trainer_calls.task_check import module_folders
from bamboo_core.job.manifest import parse_source
from bamboo_core.job.pod_fields import unknown_in_template
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.yaml_file import ManifestSource, read_manifest_source


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


def source_of_file(path: str, *, pods: bool = True) -> JobSource:
    """The job of a manifest's file; - is standard input. Raises ManifestError, whose problems name file and line.

    pods: fields of the pod template that no Kubernetes is known to have are mistakes, too.
    """
    return source_of_manifest(read_manifest_source(path), module_folders(Path(path)), pods=pods)


def source_of_manifest(manifest: ManifestSource, folders: tuple[Path, ...], *, pods: bool = True) -> JobSource:
    """The job of a manifest that was read, as `source_of_file` has it. Raises ManifestError."""
    return JobSource(
        name=manifest.name,
        spec=parse_source(manifest, unknown_in_template) if pods else parse_source(manifest),
        document=copy.deepcopy(manifest.document),
        folders=folders,
        text=manifest.text,
    )
