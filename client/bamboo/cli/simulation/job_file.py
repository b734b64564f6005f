"""The job of a manifest's file, for commands that plan, simulate, measure and run it."""

from pathlib import Path
from typing import TYPE_CHECKING

from bamboo.cli.dispatch import usage

if TYPE_CHECKING:
    from bamboo.local.job_source import JobSource


def job_of(path: Path, *, pods: bool = True) -> "JobSource":
    """Return the job of a manifest's file, as `source_of_file` does. A mistake in it ends the command."""
    from bamboo.local.job_source import source_of_file
    from bamboo_core.job.manifest import ManifestError

    try:
        return source_of_file(str(path), pods=pods)
    except ManifestError as error:
        usage(*map(str, error.problems))
