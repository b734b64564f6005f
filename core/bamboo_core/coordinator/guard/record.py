"""What a coordinator knows of the sums of states."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from bamboo_core.coordinator.replacing import replace
from bamboo_core.planning.plan import WorkerId

KEPT_VERSIONS: Final = 4  # nobody lags by more than one step, and at the beginning several in a row are compared

Place = tuple[int, int]  # stage and version


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldState:
    """The state of a stage at a version. sums: by tensor, as `first` has told them; equal: all workers that told the
    same ones.
    """

    sums: Mapping[str, str]
    first: WorkerId
    equal: frozenset[WorkerId]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardState:
    """told: the newest versions, and one of which a checkpoint is in progress. plan_origin: of the plan whose states
    they are. differences: how many were found, of states and by spot checks.
    """

    plan_origin: int = 0
    told: Mapping[Place, ToldState] = field(default_factory=dict)
    differences: int = 0

    def at(self, origin: int, stage: int, version: int) -> ToldState | None:
        """What was told of that state; None if nothing was."""
        return self.told.get((stage, version)) if origin == self.plan_origin else None

    def telling(
        self, origin: int, place: Place, worker: WorkerId, sums: Mapping[str, str], kept: int | None
    ) -> "GuardState":
        """A worker tells the sums of a state, which are those that others have told, if any have. kept: a version that
        is not dropped, however old.
        """
        before = self.told if origin == self.plan_origin else {}
        known = before.get(place) or ToldState(sums=sums, first=worker, equal=frozenset())
        told = {**before, place: replace(known, equal=known.equal | {worker})}
        newest = {kept, *sorted({version for _, version in told})[-KEPT_VERSIONS:]}
        return replace(self, plan_origin=origin, told={one: state for one, state in told.items() if one[1] in newest})

    def are_equal(self, origin: int, version: int, holders: Collection[Collection[WorkerId]]) -> bool:
        """Whether all of these workers have told the same sums of that version. holders: of each stage."""
        for stage, workers in enumerate(holders):
            told = self.at(origin, stage, version)
            if not (told.equal if told else frozenset()).issuperset(workers):
                return False
        return True
