"""What a BambooJob's status is made of, beside what the coordinator says."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal

from bamboo_core.coordinator.events import Finish
from bamboo_core.job.api_object import whole_seconds
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import BambooJobStatus
from bamboo_operator.pods.rollout import RolloutRecord
from bamboo_operator.pods.starting.startup_problems import StartupProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierCounts:
    """What had been counted when this coordinator was created: its own counts are added."""

    preemptions: int = 0
    takeovers: int = 0
    restores: int = 0
    restarts: int = 0
    cost: Decimal = Decimal(0)

    @classmethod
    def of(cls, previous: BambooJobStatus) -> "EarlierCounts":
        """What was counted before this operator knew the job. previous: the status found when the coordinator is
        created.
        """
        return cls(
            preemptions=previous.preemptions,
            takeovers=previous.takeovers,
            restores=previous.restores,
            restarts=previous.restarts,
            cost=Decimal(previous.cost.total or 0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusFacts:
    """What the operator knows beside the coordinator, from which a job's status is made."""

    now: datetime
    generation: int
    spec: JobSpec | None  # the one in force; None if there never was a valid one
    problems: tuple[str, ...] = ()  # what is wrong with the newest manifest
    refused: str = ""  # what of it a running job does not follow
    deleted: bool = False  # it is being deleted; its workers were told to stop
    unattended: bool = False  # its workers train, and no operator manages them
    warnings: tuple[str, ...] = ()  # what of it has no effect
    surprises: tuple[str, ...] = ()  # what of the spec may not be meant so
    earlier: EarlierCounts = EarlierCounts()
    pods: Mapping[str, int] = field(default_factory=dict)  # the living ones, by the name of their pool
    paid: Mapping[str, int] | None = None  # those of them that have a node, None for all
    startup_problems: tuple[StartupProblem, ...] = ()  # why some do not start
    cost: Decimal = Decimal(0)  # since this operator has known the job
    counted_until: datetime | None = None  # until when, None if it never was
    finish: Finish | None = None
    plan: str | None = None  # as it is to be kept
    rollout: RolloutRecord | None = None  # None if it is not known yet
    unmanaged: str = ""  # why its queue has no effect, a sentence

    @property
    def pools(self) -> tuple[NodePool, ...]:
        """The job's node pools; () without a spec."""
        return () if self.spec is None else self.spec.node_pools

    @property
    def suspended(self) -> bool:
        """Whether the job is suspended: by its user, or because money is spent."""
        return self.spec is not None and (self.spec.suspend or self.spent)

    @property
    def total_cost(self) -> Decimal:
        """The cost over all operators."""
        return self.earlier.cost + self.cost

    @property
    def spent(self) -> bool:
        """Has the job cost as much as it may?"""
        money = self.spec.budget.money if self.spec and self.spec.budget else None
        return money is not None and self.total_cost >= money

    @property
    def time(self) -> datetime:
        """The time as a status has it."""
        return whole_seconds(self.now)
