"""A snapshot of a job with its workers and events, to show on a terminal."""

from dataclasses import dataclass
from datetime import datetime

from bamboo_core.view.job_view import CellIndex, JobView


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteWorker:
    """A worker's pod.

    state: pending, starting, waiting, training, standby, leaving, ended or failed. detail: the reason for the state.
    cells: (pipeline, stage) of each cell that it runs. Unknown text is "".
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
    """An event of a job or a pod. about: the name of the job or pod; "" for a local job.

    count: how often it occurred. order: sorts events of the same time.
    """

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
    """A job with the workers and events that the user may see. missing: a sentence for each hidden part."""

    job: JobView
    workers: tuple[RemoteWorker, ...] = ()
    events: tuple[JobEvent, ...] = ()
    missing: tuple[str, ...] = ()


class UnseenEvents:
    """A filter for events that were not shown yet. An event counts as new whenever its `count` has grown."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def of(self, found: tuple[JobEvent, ...]) -> list[JobEvent]:
        """Return the new events among these, and remember them as shown."""
        new = [h for h in found if self._seen.get(h.uid, 0) < h.count]
        self._seen |= {h.uid: h.count for h in new}
        return new
