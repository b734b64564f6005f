"""What a coordinator knows of results that differ."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from bamboo_core.coordinator.verification.evidence import Dispute, Place, StatePlace
from bamboo_core.planning.plan import WorkerId

KEPT_VERSIONS: Final = 8


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

    def with_sum(self, place: StatePlace, worker: WorkerId, sum_: str) -> "VerificationState":
        """A holder tells of a state; only the newest versions are kept."""
        sums = {**self.sums, place: {**self.sums.get(place, {}), worker: sum_}}
        oldest = sorted({one.version for one in sums})[-KEPT_VERSIONS:][0]
        return replace(self, sums={one: told for one, told in sums.items() if one.version >= oldest})

    def known_to_differ(self, place: StatePlace) -> "VerificationState":
        return replace(self, weighed=self.weighed | {place})

    def weighing(self, place: StatePlace) -> "VerificationState":
        """It is not waited for more sums of a state, which differ."""
        left = {one: since for one, since in self.differing.items() if one != place}
        return replace(self, differing=left, weighed=self.weighed | {place})

    def waiting(self, place: StatePlace, since: float) -> "VerificationState":
        """Sums of a state differ, and some holders have not told theirs."""
        return replace(self, differing={**self.differing, place: since})

    def agreeing(self, place: StatePlace, epoch: int) -> "VerificationState":
        """All holders of a state are equal, under the plan of that epoch."""
        return replace(self, agreed={**self.agreed, place.stage: (place.version, epoch)})

    def without_sums(self) -> "VerificationState":
        """The states of which workers have told are given up."""
        return replace(self, sums={}, differing={}, weighed=frozenset(), agreed={})

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
