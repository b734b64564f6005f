"""A job parsed from a manifest, with the manifest itself and the folders of the task's modules."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bamboo_core.job.manifest import parse_source
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.yaml_file import ManifestSource, read_manifest_source


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSource:
    """A job and the manifest from which it was parsed.

    name: what errors call the manifest, such as its path. document: the parsed YAML. folders: where the task's modules
    are searched first. text: the manifest as written.
    """

    name: str
    spec: JobSpec
    document: dict[str, Any]
    folders: tuple[Path, ...] = (Path(),)
    text: str = ""


def source_of_file(path: str) -> JobSource:
    """Read a job from a manifest file; - is standard input. Raises ManifestError, whose problems name file and line.

    The task's modules are searched in the manifest's folder, as Python does for a script, then in the current folder.
    """
    return source_of_manifest(read_manifest_source(path), (Path(path).resolve().parent, Path.cwd()))


def source_of_manifest(manifest: ManifestSource, folders: tuple[Path, ...]) -> JobSource:
    """Parse the job of a manifest that has been read. folders: as in `JobSource`. Raises ManifestError."""
    return JobSource(
        name=manifest.name,
        spec=parse_source(manifest),
        document=copy.deepcopy(manifest.document),
        folders=folders,
        text=manifest.text,
    )
