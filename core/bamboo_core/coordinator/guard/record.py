"""The coordinator's record of the sums of states."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from bamboo_core.coordinator.replacing import replace
from bamboo_core.planning.plan import WorkerId

KEPT_VERSIONS: Final = 4  # no worker lags by more than one step; at the start several consecutive versions are compared

Place = tuple[int, int]  # stage and version


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedState:
    """The reported sums of a stage's state at a version. sums: by tensor, from worker `first`. equal: all workers that
    reported the same sums.
    """

    sums: Mapping[str, str]
    first: WorkerId
    equal: frozenset[WorkerId]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardState:
    """The reported sums of the newest versions and of the version of a checkpoint in progress.

    reported: these by stage and version. plan_origin: the origin of the plan whose states they are. differences: how
    many differences were found, of states and by spot checks.
    """

    plan_origin: int = 0
    reported: Mapping[Place, ReportedState] = field(default_factory=dict)
    differences: int = 0

    def at(self, origin: int, stage: int, version: int) -> ReportedState | None:
        """Return the reported sums of that state; None without a report."""
        return self.reported.get((stage, version)) if origin == self.plan_origin else None

    def telling(
        self, origin: int, place: Place, worker: WorkerId, sums: Mapping[str, str], kept: int | None
    ) -> "GuardState":
        """Record the sums that a worker reports, which equal earlier reports of that state. kept: a version to keep,
        however old.
        """
        before = self.reported if origin == self.plan_origin else {}
        known = before.get(place) or ReportedState(sums=sums, first=worker, equal=frozenset())
        reported = {**before, place: replace(known, equal=known.equal | {worker})}
        newest = {kept, *sorted({version for _, version in reported})[-KEPT_VERSIONS:]}
        kept_states = {one: state for one, state in reported.items() if one[1] in newest}
        return replace(self, plan_origin=origin, reported=kept_states)

    def are_equal(self, origin: int, version: int, holders: Collection[Collection[WorkerId]]) -> bool:
        """Return whether all of these workers have reported the same sums of that version. holders: the workers of each
        stage.
        """
        for stage, workers in enumerate(holders):
            reported = self.at(origin, stage, version)
            if not (reported.equal if reported else frozenset()).issuperset(workers):
                return False
        return True
