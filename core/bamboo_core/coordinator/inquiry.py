"""The coordinator's question to all workers about the states they hold, asked when stages or layers seem lost."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bamboo_core.control import protocol
from bamboo_core.coordinator.replacing import replace
from bamboo_core.planning.plan import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """The question in progress.

    began_at: when all workers were first asked; None if no question is open. asked_at: when they were last asked.
    reports: the answers to the last round.
    """

    began_at: float | None = None
    asked_at: float = 0.0
    reports: Mapping[WorkerId, protocol.Report] = field(default_factory=dict)

    def over(self) -> "Inquiry":
        """Close the question."""
        return replace(self, began_at=None, reports={})
