"""Profiles by name: files, Bamboo's own, and the job's own layers on a device that is not here."""

from pathlib import Path

from bamboo.local.job_source import JobSource
from bamboo.local.trainer_calls.task_counts import count_task
from bamboo.profiles.analytic import analytic_profile
from bamboo.profiles.files import AT, read_devices, read_profile
from bamboo.profiles.layer_counts import TaskCounts
from bamboo_core.planning.profile import ModelProfile


class JobProfiles:
    """A reader of profiles for one job, which counts the job's layers once, on demand."""

    def __init__(self, job: JobSource) -> None:
        self._job = job
        self._counts: TaskCounts | None = None

    def read(self, name: str) -> ModelProfile:
        """Read a profile: for @DEVICE of the job's own layers, else as `read_profile` does. Raises ProfileError."""
        if not name.startswith(AT) or Path(name).exists():
            return read_profile(name)
        table = read_devices()
        table.named(name[len(AT) :])  # raises for an unknown device before counting
        if self._counts is None:
            self._counts = count_task(self._job.spec, self._job.document, self._job.folders)
        return analytic_profile(self._counts, table, name[len(AT) :])
