"""Where a job's history is kept."""

from pathlib import Path

from bamboo.history.files import FOLDER
from bamboo.job.spec import JobSpec
from bamboo.names import STORAGE_FOLDER


def history_url(spec: JobSpec, output: Path | None = None) -> str:
    """Beside the job's checkpoints, or else in that folder; "" for nowhere."""
    if spec.checkpoint is not None:
        place = spec.checkpoint.storage.uri or f"{STORAGE_FOLDER}/{spec.name}/checkpoints"
    elif output is not None:
        place = output.absolute().as_uri()
    else:
        return ""
    return f"{place.rstrip('/')}/{FOLDER}/{spec.name}"
