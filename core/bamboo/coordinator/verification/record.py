"""What a coordinator knows of results that differ."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bamboo.coordinator.verification.evidence import Dispute, Place, StatePlace
from bamboo.planning.plan import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationState:
    """sums: of the newest versions that holders have told of, by worker. differing: those that are not equal, and since
    when, until all holders have told, or enough time has passed. weighed: those that were found to differ.

    agreed: of each state, the newest version at which all holders were equal, and the plan's epoch then.
    disputes: open ones. asked: the origin of the plan whose workers were asked to look again.
    found: how many differences, by kind. corrupt: workers whose results were wrong. told: differences that are not told
    of again. unresolved, resolved: the newest one, as a sentence.
    """

    sums: Mapping[StatePlace, Mapping[WorkerId, str]] = field(default_factory=dict)
    differing: Mapping[StatePlace, float] = field(default_factory=dict)
    weighed: frozenset[StatePlace] = frozenset()
    agreed: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    disputes: tuple[Dispute, ...] = ()
    asked: int = 0
    found: Mapping[str, int] = field(default_factory=dict)
    corrupt: tuple[WorkerId, ...] = ()
    told: frozenset[tuple[str, int, tuple[WorkerId, ...]]] = frozenset()
    unresolved: str = ""
    resolved: str = ""

    def dispute_over(self, place: Place) -> Dispute | None:
        return next((one for one in self.disputes if one.place == place), None)

    def disputes_without(self, place: Place) -> tuple[Dispute, ...]:
        return tuple(one for one in self.disputes if one.place != place)

    def disputes_with(self, dispute: Dispute) -> tuple[Dispute, ...]:
        """With what is known of it now, as the newest one."""
        return (*self.disputes_without(dispute.place), dispute)
