"""Errors of Bamboo's Python API. Each is a `BambooError` whose text is a sentence for the user."""

from collections.abc import Sequence

from bamboo_core.job.fields import Problem


class BambooError(Exception):
    """Base class of the API's errors."""


class InvalidJob(BambooError, ValueError):
    """The job's manifest is invalid. problems: all mistakes, each with its field and the expected value."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


class InvalidRequest(BambooError, ValueError):
    """An argument is invalid, or the request is not possible for this job."""


class JobError(BambooError):
    """A job ended without being complete.

    reason: a CamelCase word. message: a sentence. log: the last lines of its workers, with the traceback of the user's
    code if that is the cause; "" if unknown.
    """

    def __init__(self, name: str, reason: str, message: str, log: str = "") -> None:
        text = f"{name}: {reason}. {message}".rstrip()
        super().__init__(f"{text}\n\n{log}" if log else text)
        self.name, self.reason, self.message, self.log = name, reason, message, log


class JobFailed(JobError):
    """The job failed because of its code, its data or its machines."""


class JobUnrecoverable(JobError):
    """A part of the state was lost with all its copies, and the job could not go back to a checkpoint."""


class JobInterrupted(JobError):
    """The user stopped the job, or it was deleted from the cluster."""


class ClusterError(BambooError):
    """A request failed: the API server refused it or cannot be reached, or the job's state does not allow it."""


class NotInTime(BambooError, TimeoutError):
    """A wait timed out. The job goes on."""
