"""The URL of a job's history."""

from pathlib import Path

from bamboo_core.history.files import FOLDER
from bamboo_core.job.spec import JobSpec


def history_url(spec: JobSpec, output: Path | None = None, *, stored: bool = True) -> str:
    """Return the URL next to the job's checkpoints, else in the output folder; "" for neither. stored: checkpoints can
    be written.
    """
    if spec.checkpoint is not None and (stored or output is None):
        place = spec.checkpoint.place(spec.name)
    elif output is not None:
        place = output.absolute().as_uri()
    else:
        return ""
    return f"{place.rstrip('/')}/{FOLDER}/{spec.name}"
