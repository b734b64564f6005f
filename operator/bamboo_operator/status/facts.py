"""The operator's facts about a job, which the job's status combines with the coordinator's status."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal

from bamboo_core.coordinator.events import Finish
from bamboo_core.job.api_object import whole_seconds
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import BambooJobStatus
from bamboo_core.page.timeline import JobTimeline
from bamboo_core.view.job_view import JobView
from bamboo_operator.pods.rollout import RolloutRecord
from bamboo_operator.pods.starting import StartupProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusFacts:
    """The facts about a job that the operator adds to the coordinator's status to build the job's status."""

    now: datetime
    generation: int
    spec: JobSpec | None  # the spec in force; None until the job's reconciler finds a valid one
    problems: tuple[str, ...] = ()  # errors of the newest manifest
    refused: str = ""  # changes of the manifest that a running job does not follow
    deleted: bool = False  # the job is being deleted, and its workers stop
    unattended: bool = False  # the job's workers train without a coordinator, since the newest manifest is invalid
    warnings: tuple[str, ...] = ()  # about the templates' ignored fields and hostNetwork
    surprises: tuple[str, ...] = ()  # settings that may not be intended
    # the status before the present coordinator; its counts are added to the coordinator's
    earlier: BambooJobStatus = field(default_factory=BambooJobStatus)
    pods: Mapping[str, int] = field(default_factory=dict)  # number of living pods by pool
    paid: Mapping[str, int] | None = None  # number of pods with a node by pool; None before the first count
    startup_problems: tuple[StartupProblem, ...] = ()  # why some workers do not start
    cost: Decimal = Decimal(0)  # the job's cost so far, also under earlier operators
    counted_until: datetime | None = None  # time up to which cost is counted; None if it never was
    finish: Finish | None = None
    plan: str | None = None  # the plan record to keep
    rollout: RolloutRecord | None = None  # None if not known yet
    unmanaged: str = ""  # why the job's queue has no effect, as a sentence

    @property
    def pools(self) -> tuple[NodePool, ...]:
        """The job's node pools; () without a spec."""
        return () if self.spec is None else self.spec.node_pools

    @property
    def suspended(self) -> bool:
        """Whether the user or a spent budget suspends the job."""
        return self.spec is not None and (self.spec.suspend or self.spent)

    @property
    def spent(self) -> bool:
        """Whether the job's cost has reached its budget.money; False without a budget."""
        money = self.spec.budget.money if self.spec and self.spec.budget else None
        return money is not None and self.cost >= money

    @property
    def time(self) -> datetime:
        """`now` in UTC, cut to whole seconds, as a status holds times."""
        return whole_seconds(self.now)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatedJob:
    """A job as its operator knows it, for its page and its metrics.

    view: holds the spec in force (else the valid parts of the newest), the last written status and the coordinator's.
    """

    view: JobView
    facts: StatusFacts
    record: JobTimeline | None = None  # None if no coordinator has run here
