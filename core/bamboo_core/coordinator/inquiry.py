"""The question to all workers what they hold, asked when a stage or layers seem to be lost."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bamboo_core.control import protocol
from bamboo_core.coordinator.replacing import replace
from bamboo_core.planning.plan import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """began_at: when everyone was asked first; None if nothing is in question. asked_at: when everyone was asked last.
    reports: the answers to that.
    """

    began_at: float | None = None
    asked_at: float = 0.0
    reports: Mapping[WorkerId, protocol.Report] = field(default_factory=dict)

    def over(self) -> "Inquiry":
        """What was in question is decided, or is there."""
        return replace(self, began_at=None, reports={})
