"""Errors of Bamboo's Python API. Each is a `BambooError` whose text is a sentence for the user."""

from collections.abc import Sequence

from bamboo_core.job.fields import Problem


class BambooError(Exception):
    """Base class of the API's errors."""


class InvalidJob(BambooError, ValueError):
    """Error for an invalid manifest. problems: all mistakes, each with its field and the expected value."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


class InvalidRequest(BambooError, ValueError):
    """Error for an invalid argument, or for a request that is not possible for this job."""


class JobError(BambooError):
    """Error for a job that ended without being complete.

    reason: a CamelCase word. message: a sentence. log: the last lines of its workers, with the traceback of the user's
    code if that is the cause; "" if unknown.
    """

    def __init__(self, name: str, reason: str, message: str, log: str = "") -> None:
        text = f"{name}: {reason}. {message}".rstrip()
        super().__init__(f"{text}\n\n{log}" if log else text)
        self.name, self.reason, self.message, self.log = name, reason, message, log


class JobFailed(JobError):
    """Error for a job that failed because of its code, its data or its machines."""


class JobUnrecoverable(JobError):
    """Error for a job that lost all copies of a part of its state, and could not go back to a checkpoint."""


class JobInterrupted(JobError):
    """Error for a job that the user stopped, or that was deleted from the cluster."""


class ClusterError(BambooError):
    """Error for a request that the API server refused, that did not reach it, or that the job's state forbids."""


class NotInTime(BambooError, TimeoutError):
    """Error for a wait that timed out. The job goes on."""
