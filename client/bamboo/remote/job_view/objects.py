"""Workers and events of a job as the command line sees them: facts, and what follows from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bamboo_core.view.job_view import CellIndex

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteWorker:
    """state: pending, starting, waiting, training, standby, leaving, ended or failed; detail: why, if that is known."""

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
    """An event. about: the job's or a pod's name."""

    uid: str
    at: datetime
    order: int
    about: str
    reason: str
    message: str
    warning: bool
    count: int
