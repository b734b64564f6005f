"""The client: command line, Python API, local runs, jobs on a cluster, simulations and plans.

`bamboo.Job` builds, checks, plans, simulates, runs and submits a job; docs/sdk.md shows how. Names that are not listed
here may change without notice.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from bamboo.jobs.client import Client
    from bamboo.jobs.errors import (
        BambooError,
        ClusterError,
        InvalidJob,
        InvalidRequest,
        JobError,
        JobFailed,
        JobInterrupted,
        JobUnrecoverable,
        NotInTime,
    )
    from bamboo.jobs.handle import JobHandle, load
    from bamboo.jobs.job import Job

__all__ = [
    "BambooError",
    "Client",
    "ClusterError",
    "InvalidJob",
    "InvalidRequest",
    "Job",
    "JobError",
    "JobFailed",
    "JobHandle",
    "JobInterrupted",
    "JobUnrecoverable",
    "NotInTime",
    "load",
]
_MODULES: Final = {
    "Client": "client",
    "Job": "job",
    "JobHandle": "handle",
    "load": "handle",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line starts quickly."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"bamboo.jobs.{_MODULES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
