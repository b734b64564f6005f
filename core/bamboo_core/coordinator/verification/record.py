"""What a coordinator knows of results that differ."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from bamboo_core.coordinator.verification.evidence import Dispute, Place
from bamboo_core.planning.plan import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationState:
    """disputes: open ones. asked: the origin of the plan whose workers were asked to look again.
    found: how many differences, by kind. corrupt: workers whose results were wrong. told: differences that are not told
    of again. unresolved, resolved: the newest one, as a sentence.
    """

    disputes: tuple[Dispute, ...] = ()
    asked: int = 0
    found: Mapping[str, int] = field(default_factory=dict)
    corrupt: tuple[WorkerId, ...] = ()
    told: frozenset[tuple[str, int, tuple[WorkerId, ...]]] = frozenset()
    unresolved: str = ""
    resolved: str = ""

    def dispute_over(self, place: Place) -> Dispute | None:
        return next((one for one in self.disputes if one.place == place), None)

    def without_dispute(self, place: Place) -> "VerificationState":
        return replace(self, disputes=tuple(one for one in self.disputes if one.place != place))

    def with_dispute(self, dispute: Dispute) -> "VerificationState":
        """With what is known of it now, as the newest one."""
        others = self.without_dispute(dispute.place).disputes
        return replace(self, disputes=(*others, dispute))

    def asking(self, origin: int) -> "VerificationState":
        """The workers of the plan of that origin are asked to look again."""
        return replace(self, asked=origin)

    def counted(self, place: Place, workers: tuple[WorkerId, ...], text: str) -> "VerificationState":
        """These workers' results differ. text: that, as a sentence."""
        found = {**self.found, place.kind: self.found.get(place.kind, 0) + 1}
        told = self.told | {(place.kind, place.stage, workers)}
        return replace(self, found=found, told=told, unresolved=text)

    def naming(self, corrupt: Iterable[WorkerId], *, unresolved: str, resolved: str) -> "VerificationState":
        """It is known whose results were wrong."""
        return replace(self, corrupt=(*self.corrupt, *corrupt), unresolved=unresolved, resolved=resolved)

    def resolved_as(self, text: str) -> "VerificationState":
        return replace(self, unresolved="", resolved=text)
