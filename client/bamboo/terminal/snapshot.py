"""A snapshot of a job with its workers and events, to show on a terminal."""

from dataclasses import dataclass
from datetime import datetime

from bamboo_core.view.job_view import CellIndex, JobView


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteWorker:
    """A worker's pod.

    state: pending, starting, waiting, training, standby, leaving, ended or failed. detail: why, if known.
    """

    name: str
    uid: str
    number: int
    state: str
    detail: str
    cells: tuple[CellIndex, ...]
    node: str
    zone: str
    capacity: str
    pool: str
    created: datetime | None
    grace_seconds: int

    @property
    def alive(self) -> bool:
        return self.state not in ("ended", "failed")

    @property
    def has_log(self) -> bool:
        return self.state not in ("pending", "starting")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """An event. about: the name of a pod, or "" for the job itself."""

    at: datetime
    reason: str
    message: str
    warning: bool
    about: str = ""
    count: int = 1
    uid: str = ""
    order: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSnapshot:
    """A job with the parts that the user may see. missing: sentences about the others."""

    job: JobView
    workers: tuple[RemoteWorker, ...] = ()
    events: tuple[JobEvent, ...] = ()
    missing: tuple[str, ...] = ()
