"""Jobs, workers and events as the command line sees them: facts, and what follows from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bamboo_core.coordinator.protection import OFF
from bamboo_core.job.spec import storage_place
from bamboo_core.job.status import BambooJobStatus
from bamboo_core.kube.resources import BambooJobSpec, Metadata
from bamboo_core.names import EXIT_FAILED, EXIT_OK, EXIT_UNRECOVERABLE

Json = Mapping[str, Any]
CellIndex = tuple[int, int]  # pipeline and stage

UNRECOVERABLE = (
    "RestoreDeadlineExceeded",
    "RestoreFailed",
    "StageLost",
    "WorkersGone",
)  # reasons of jobs that nothing could save
USUAL = {
    "Accepted": True,
    "WorkersReady": True,
    "WorkersUpdated": True,
    "Running": True,
    "Protected": True,
}  # conditions that are not False when all is well


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCondition:
    kind: str
    holds: bool
    reason: str
    message: str
    since: datetime | None

    @property
    def usual(self) -> bool:
        """Is it as it is when all is well, or when the job is over or suspended, which another condition says?"""
        idle = self.reason == "JobOver" or (self.reason == "Suspended" and not self.holds)
        return idle or self.reason == OFF or self.holds is USUAL.get(self.kind, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteJob:
    """A job as the API server has it. plan: owners by pipeline and stage; none if it is not known (yet)."""

    metadata: Metadata
    spec: BambooJobSpec
    status: BambooJobStatus
    conditions: tuple[JobCondition, ...]
    plan: tuple[tuple[str, ...], ...]

    @property
    def namespace(self) -> str:
        return self.metadata.namespace

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def uid(self) -> str:
        return self.metadata.uid

    @property
    def steps(self) -> int:
        """Those that are wanted; 0 if nobody has told them yet."""
        return self.status.training.steps or self.spec.training.steps

    @property
    def checkpoint_place(self) -> str:
        """Where its checkpoints are, without credentials; empty if it keeps none."""
        if self.spec.checkpoint is None:
            return ""
        storage = self.spec.checkpoint.storage
        return storage_place(storage.uri, storage.persistent_volume_claim.claim_name)

    @property
    def unpriced(self) -> tuple[str, ...]:
        """The pools whose workers are not in the cost."""
        return tuple(p.name for p in self.spec.node_pools if p.price_per_hour is None and p.machine is None)

    def condition(self, kind: str) -> JobCondition | None:
        return next((c for c in self.conditions if c.kind == kind), None)

    def holds(self, kind: str) -> bool:
        found = self.condition(kind)
        return found is not None and found.holds

    @property
    def ended(self) -> JobCondition | None:
        """The condition with which the job is over."""
        return next((c for c in self.conditions if c.kind in ("Complete", "Failed") and c.holds), None)

    @property
    def held_back(self) -> str:
        """Why the operator keeps it suspended though its manifest does not say so, as when its budget is spent, and
        what helps; "" if it does not.
        """
        told = self.condition("Suspended")
        if self.spec.suspend or self.ended or told is None or not told.holds or told.reason == "Suspended":
            return ""
        return told.message

    @property
    def suspended(self) -> bool:
        return self.spec.suspend or bool(self.held_back)

    @property
    def exit_code(self) -> int | None:
        """As `bamboo run` would have ended; None while the job is not over."""
        end = self.ended
        if end is None:
            return None
        if end.kind == "Complete":
            return EXIT_OK
        return EXIT_UNRECOVERABLE if end.reason in UNRECOVERABLE else EXIT_FAILED

    @property
    def protected(self) -> bool:
        """Has every stage what is meant to protect it?

        Without the condition Protected, as an older operator has it, Degraded names three faults at most, and more
        may hide others.
        """
        if told := self.condition("Protected"):
            return told.holds or told.reason == OFF
        degraded = self.condition("Degraded")
        if degraded is None or not degraded.holds:
            return True
        return not any(sign in degraded.message for sign in ("has no second copy", "; and "))

    def short(self, worker: str) -> str:
        """A worker's name without the job's, where it has that: w3 for quickstart-w3."""
        return worker.removeprefix(f"{self.name}-")

    def cells(self, worker: str) -> tuple[CellIndex, ...]:
        """What the worker runs."""
        return tuple((d, s) for d, row in enumerate(self.plan) for s, owner in enumerate(row) if owner == worker)

    @property
    def doubled(self) -> set[str]:
        """Workers that run more than one stage."""
        return {worker for row in self.plan for worker in row if len(self.cells(worker)) > 1}


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
