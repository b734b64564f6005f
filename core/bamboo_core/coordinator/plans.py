"""The plan in force: which workers apply it, which replicas are in step, and whether it is to stay."""

from dataclasses import dataclass, field

import msgspec

from bamboo_core.coordinator.replacing import replace
from bamboo_core.planning.desired import PlanningView
from bamboo_core.planning.plan import Cell, Plan, WorkerId


@dataclass(frozen=True, kw_only=True)  # without slots, for a fast `replace`
class Plans:
    """Plans of the job.

    newest: None before the first one. since_step: number of steps committed when it was made. applied: workers that
    have applied it. synced: replicas in step, by cell. in_force: the plan that all follow until the next step begins,
    while the newest plan only ends that plan's portions.

    steady: the last reconciliation found nothing to do, and time alone will not change that. settled: the newest view
    for which no plan was better.
    """

    newest: Plan | None = None
    since_step: int = 0
    applied: frozenset[WorkerId] = frozenset()
    synced: frozenset[tuple[Cell, WorkerId]] = frozenset()
    in_force: Plan | None = None
    steady: bool = False
    settled: PlanningView | None = field(default=None, compare=False, repr=False)

    def moved_by(self, plan: Plan) -> list[tuple[Cell, WorkerId]]:
        """Return the cells that a new plan gives to other owners, with their present owners."""
        return [(cell, owner) for cell, owner in self._owners_before(plan) if owner != plan.at(cell).owner]

    def issued(self, plan: Plan, step: int) -> "Plans":
        """Make a plan the newest one.

        Replicas of an owner that stays keep their state; an owner that becomes a replica has what its successor has.
        """
        synced: set[tuple[Cell, WorkerId]] = set()
        for cell, owner in self._owners_before(plan):
            now = plan.at(cell)
            if owner == now.owner:
                synced |= {(cell, w) for w in now.replicas if (cell, w) in self.synced}
            else:
                synced |= {(cell, w) for w in now.replicas if w == owner}
        in_force = self.newest if plan.boundary and plan.reason == "Settled" else None
        return replace(
            self, newest=plan, since_step=step, applied=frozenset(), synced=frozenset(synced), in_force=in_force
        )

    def settles(self, step: int) -> bool:
        """Return whether the newest plan only ends the portions of the step in progress and waits for its end."""
        return self.in_force is not None and step <= self.since_step

    def of_step(self, step: int) -> Plan | None:
        """Return the plan of the step in progress, with the epoch of the newest one; later plans derive from it."""
        if self.newest is None or self.in_force is None or not self.settles(step):
            return self.newest
        return msgspec.structs.replace(self.in_force, epoch=self.newest.epoch)

    def _owners_before(self, plan: Plan) -> list[tuple[Cell, WorkerId]]:
        """Return the cells also in the newest plan, with its owners; none if workers start from other states."""
        old = self.newest
        if old is None or old.origin != plan.origin:
            return []
        return [(cell, old.at(cell).owner) for cell in plan.cells() if cell.pipeline < len(old.pipelines)]

    def brought(self, plan: Plan) -> "Plans":
        """Take a plan that a worker reports and this coordinator did not know."""
        old = self.newest
        if old is not None and plan.epoch <= old.epoch:
            return self
        kept = {
            (cell, w) for cell, w in self.synced if old and plan.has(cell) and plan.at(cell).owner == old.at(cell).owner
        }
        return replace(self, newest=plan, synced=frozenset(kept), applied=frozenset(), in_force=None)

    def kept_for(self, view: PlanningView, *, steady: bool) -> "Plans":
        """Record that no plan is better for this view."""
        if not (steady or self.steady) and view == self.settled:
            return self
        return replace(self, settled=view, steady=steady)
