"""The errors of Bamboo's Python API. All are a `BambooError`, and their text is a sentence for a person."""

from collections.abc import Sequence

from bamboo_core.job.fields import ManifestError, Problem


class BambooError(Exception):
    """Something that was asked of Bamboo did not come to be."""


class InvalidJob(BambooError, ValueError):
    """The job's manifest is wrong. problems: all of them, each with its field and what was expected there."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[type["InvalidJob"], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)

    @classmethod
    def from_manifest_error(cls, error: ManifestError) -> "InvalidJob":
        return cls(error.problems)


class InvalidRequest(BambooError, ValueError):
    """An argument is wrong, or what it asks for cannot be done with this job."""


class JobError(BambooError):
    """A job ended, and is not complete. reason: a CamelCase word; message: a sentence. log: the end of what its workers
    printed, with the traceback of the user's code if that is why; "" if nothing is known.
    """

    def __init__(self, name: str, reason: str, message: str, log: str = "") -> None:
        said = f"{name}: {reason}. {message}".rstrip()
        super().__init__(f"{said}\n\n{log}" if log else said)
        self.name, self.reason, self.message, self.log = name, reason, message, log

    def __reduce__(self) -> tuple[type["JobError"], tuple[str, str, str, str]]:
        return type(self), (self.name, self.reason, self.message, self.log)


class JobFailed(JobError):
    """The job failed: its code, its data or its machines."""


class JobUnrecoverable(JobError):
    """So many workers were lost at once that no copy of a part of the state was left, and there is no checkpoint."""


class JobInterrupted(JobError):
    """Somebody stopped the job."""


class ClusterError(BambooError):
    """The API server refused a request, or cannot be reached."""


class NotInTime(BambooError, TimeoutError):
    """What was waited for did not come in time. The job goes on."""
