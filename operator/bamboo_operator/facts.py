"""What a BambooJob's status is made of, beside what the coordinator says."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from bamboo.coordinator.events import Finish
from bamboo.job.spec import JobSpec
from bamboo_operator.savings import Comparison
from bamboo_operator.troubles import Trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What had been counted when this coordinator was made: its own counts are added to it."""

    preemptions: int = 0
    takeovers: int = 0
    restores: int = 0
    restarts: int = 0
    cost: Decimal = Decimal(0)

    @classmethod
    def of(cls, previous: Mapping[str, Any]) -> "Base":
        """previous: the status found when the coordinator is made."""
        counters = {name: int(previous.get(name) or 0) for name in ("preemptions", "takeovers", "restores", "restarts")}
        return cls(cost=Decimal((previous.get("cost") or {}).get("total") or 0), **counters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """spec: the one in force; None if there never was a valid one. problems: what is wrong with the newest manifest;
    refused: what of it a running job does not follow. unattended: its workers train, and nobody can look after them.

    warnings: what of it has no effect. pods: the living ones, by the name of their pool; paid: those of them that have
    a node, None for all. troubles: why some do not start. restores, cost: since the coordinator was made.
    comparison: of costs, over all operators. checkpoint: {lastStep, lastTime}. plan: as it is to be kept.
    """

    now: datetime
    generation: int
    spec: JobSpec | None
    problems: tuple[str, ...] = ()
    refused: str = ""
    unattended: bool = False
    warnings: tuple[str, ...] = ()
    base: Base = Base()
    restores: int = 0
    pods: Mapping[str, int] = field(default_factory=dict)
    paid: Mapping[str, int] | None = None
    troubles: tuple[Trouble, ...] = ()
    cost: Decimal = Decimal(0)
    comparison: Comparison = field(default_factory=Comparison)
    finish: Finish | None = None
    checkpoint: Mapping[str, Any] | None = None
    plan: str | None = None
    selector: str | None = None

    @property
    def suspended(self) -> bool:
        return self.spec is not None and self.spec.suspend

    @property
    def time(self) -> str:
        """As the API writes times."""
        return self.now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
