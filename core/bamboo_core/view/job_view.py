"""The view of a job for display: its facts, and what follows from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from bamboo_core.coordinator.events import Status
from bamboo_core.coordinator.protection import OFF
from bamboo_core.job.api_object import Metadata, read_leniently
from bamboo_core.job.manifest import read_spec
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import BambooJobStatus, read_status
from bamboo_core.names import EXIT_FAILED, EXIT_OK, EXIT_UNRECOVERABLE
from bamboo_core.storage.url import shown_url
from bamboo_core.view.run_status import run_status
from bamboo_core.view.shown_state import ShownState, live_state, state_in_status

CellIndex = tuple[int, int]  # pipeline and stage

UNRECOVERABLE = (
    "RestoreDeadlineExceeded",
    "RestoreFailed",
    "StageLost",
    "WorkersGone",
)  # reasons of jobs that could not be saved


@dataclass(frozen=True, kw_only=True)
class JobView:
    """The known facts of a job. live: its coordinator's present status if available, more complete and exact than
    `status`.
    """

    metadata: Metadata
    spec: JobSpec
    status: BambooJobStatus
    live: Status | None = None

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
    def state(self) -> ShownState:
        """The coordinator's state if the job runs or has no conditions; else the conditions' state."""
        state, live = state_in_status(self.status), self.live
        if live is None or state.over or (self.status.conditions and live.phase not in ("Running", "Recovering")):
            return state
        return live_state(live, self.spec)

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return self.status.training.step or 0

    @property
    def steps(self) -> int:
        """The number of steps to train; 0 while unknown."""
        return self.status.training.steps or self.spec.training.known_steps or 0

    @property
    def checkpoint_place(self) -> str:
        """The URL of the checkpoints, without credentials; "" if the job keeps none, or in a place that this version
        does not know.
        """
        return shown_url(self.spec.checkpoint.storage) if self.spec.checkpoint else ""

    @property
    def unpriced(self) -> tuple[str, ...]:
        """The pools whose workers are not in the cost."""
        return tuple(p.name for p in self.spec.node_pools if p.price_per_hour is None)

    @property
    def cost_at_end(self) -> float | None:
        """The job's cost after its last step at the present nodes, prices and speed, in the pools' currency; None if
        unknown.
        """
        spent, left = self.status.cost, self.status.training.eta_seconds
        if spent.per_hour is None or left is None or self.status.ended or self.status.holds("Suspended"):
            return None  # a suspended job's speed is outdated
        return float(spent.total or 0) + float(spent.per_hour) * left / 3600

    @property
    def held_back(self) -> str:
        """Why the operator suspends the job although its manifest does not, such as for a spent budget, and what helps;
        "" if it does not.
        """
        held = self.status.condition("Suspended")
        if self.spec.suspend or self.status.ended or held is None or not held.holds or held.reason == "Suspended":
            return ""
        return held.message

    @property
    def suspended(self) -> bool:
        return self.spec.suspend or bool(self.held_back)

    @property
    def exit_code(self) -> int | None:
        """The exit code that `bamboo run` would have; None while the job is not over."""
        end = self.status.ended
        if end is None:
            return None
        if end.type == "Complete":
            return EXIT_OK
        return EXIT_UNRECOVERABLE if end.reason in UNRECOVERABLE else EXIT_FAILED

    @property
    def protected(self) -> bool:
        """Whether every stage has its intended protection; True until the operator has written a status."""
        found = self.status.condition("Protected")
        return found is None or found.holds or found.reason == OFF

    @cached_property
    def plan(self) -> tuple[tuple[str, ...], ...]:
        """The owners by pipeline and stage; empty while unknown."""
        if self.live is not None and self.live.grid:
            return tuple(tuple(owner for owner, _ in row) for row in self.live.grid)
        return self.status.owners

    def short(self, worker: str) -> str:
        """Return a worker's name without the job's, where it has that: w3 for quickstart-w3."""
        return worker.removeprefix(f"{self.name}-")

    def cells(self, worker: str) -> tuple[CellIndex, ...]:
        """Return the cells that the worker runs."""
        return tuple((d, s) for d, row in enumerate(self.plan) for s, owner in enumerate(row) if owner == worker)

    @property
    def doubled(self) -> set[str]:
        """Workers that run more than one stage."""
        return {worker for row in self.plan for worker in row if len(self.cells(worker)) > 1}


def view_of(body: Mapping[str, Any]) -> JobView:
    """Return the view of a BambooJob from the API server. Fields that this version cannot read count as absent."""
    metadata, status = read_leniently(Metadata, body.get("metadata")), read_status(body.get("status"))
    return JobView(metadata=metadata, spec=read_spec(body), status=status)


def view_of_run(spec: JobSpec, live: Status | None, now: datetime, began: datetime | None = None) -> JobView:
    """Return the view of a job without a BambooJob that runs in this process. live: None while it starts. began: when
    it was started.
    """
    metadata = Metadata(name=spec.name, namespace=spec.namespace, creation_timestamp=began)
    status = run_status(live, now) if live is not None else BambooJobStatus()
    return JobView(metadata=metadata, spec=spec, status=status, live=live)
