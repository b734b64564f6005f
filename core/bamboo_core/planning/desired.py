"""The desired holders of each cell, given the live workers; successive plans come closer to them. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from heapq import nsmallest
from typing import Any

from bamboo_core.job.placement_spec import SpreadPolicy
from bamboo_core.job.spec import PipelineSchedule, RedundancySpec
from bamboo_core.planning.heirs import Synced, home
from bamboo_core.planning.plan import Cell, Peer, Plan, WorkerId
from bamboo_core.planning.ring import packed, replicas_in

Workers = dict[Cell, WorkerId]


class Urgency(Enum):
    """The urgency of moving a leaving worker's cells. NONE: there is time to copy the state to a replacement. SOON:
    there may only be time to finish the step. NOW: there may not even be time for that.
    """

    NONE = auto()
    SOON = auto()
    NOW = auto()


@dataclass(frozen=True, kw_only=True)
class PlanningView:
    """The inputs of the next plan: the plan in force, the workers, the replicas in sync, and the desired grid."""

    plan: Plan
    live: Mapping[WorkerId, Peer]  # in order of joining
    leaving: Mapping[WorkerId, Urgency]  # workers under notice, or told to leave
    synced: Synced
    redundancy: RedundancySpec  # the requested redundancy
    pipelines: int  # the desired number of pipelines
    generation: int  # of the newest layout under which a step was committed; -1: none yet
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B  # the desired schedule
    spread: SpreadPolicy = SpreadPolicy.INTERLEAVE
    # workers that report holding a stage's state at a usable version, by stage
    reported: Mapping[int, tuple[WorkerId, ...]] = field(default_factory=dict)
    # the part of the current step that has passed, 0 to 1; 0 while unknown
    elapsed: float = field(default=0.0, compare=False)
    remaining: float = field(default=0.0, compare=False)  # seconds left of the current step; infinite while unknown
    settles: bool = False  # the next step begins without the plan's portions
    # spare workers that keep replicas until the re-split, because they will need these layers
    beforehand: Mapping[Cell, tuple[WorkerId, ...]] = field(default_factory=dict)
    # cached results for this view, by name
    remembered: dict[str, Any] = field(init=False, default_factory=dict, compare=False, repr=False)

    def after(self, before: "PlanningView | None") -> "PlanningView":
        """Return this view, with the cached results of `before` if the two differ only in the step's timing and in the
        replicas in sync. While a worker leaves, the desired holders depend on these replicas: nothing is reused.
        """
        if before is not None and not self.leaving and self == replace(before, synced=self.synced):
            self.remembered.update(before.remembered)
        return self

    def replicas_in(self, row: Sequence[WorkerId]) -> tuple[tuple[WorkerId, ...], ...]:
        """Return the workers that keep replicas of each stage of a pipeline, the shadow first. row: the pipeline's
        workers by stage. Leaving workers keep none; a short pipeline has fewer replicas than requested.
        """
        return replicas_in(row, self.redundancy.kept, self.live, self.leaving)

    def spare(self) -> list[WorkerId]:
        """Return the workers that own no cell and are not leaving, holders of a replica first."""
        busy = self.plan.holders()
        owners = self.plan.owners()
        spare = [w for w in self.live if w not in owners and w not in self.leaving]
        return sorted(spare, key=lambda w: w not in busy)

    def domain(self, worker: WorkerId) -> str:
        """Return the worker's failure domain (see `Peer`), even for a worker of the plan that is no longer live."""
        known = self.live.get(worker) or self.plan.peer(worker)
        return known.failure_domain if known else f"/{worker}"

    def doubtful(self) -> set[str]:
        """Return the failure domains of lost and leaving workers. Other workers there may be lost next."""
        gone = self.plan.worker_ids() - self.live.keys()
        return {self.domain(w) for w in (*gone, *self.leaving)}


def desired_holders(view: PlanningView) -> dict[Cell, tuple[WorkerId, ...]]:
    """Return the desired holders of each cell: the owner, the replicas (shadow first), and workers that need the state
    for a new pipeline or a re-split. If the job keeps replicas, spare workers join a cell whose stage has too few
    holders in all pipelines, or holders on one node only. A pipeline to be removed keeps its holders.
    """
    plan = view.plan
    replacements, newcomers = replacement_owners(view), owners_of_new_rows(view)
    taken = {*replacements.values(), *newcomers.values()}
    spare = [w for w in view.spare() if w not in taken]
    owners = {c: replacements.get(c) or plan.at(c).owner for c in plan.cells()}
    rows = [[owners[Cell(d, s)] for s in range(len(plan.stages))] for d in range(plan.target.pipelines)]
    kept = [view.replicas_in(row) for row in rows]
    target, load = {}, Counter[WorkerId]()
    running = [{owners[Cell(d, s)] for d in range(plan.target.pipelines)} for s in range(len(plan.stages))]
    places = [{view.domain(w) for w in stage} for stage in running]
    for cell in plan.cells():
        if cell.pipeline >= plan.target.pipelines:
            target[cell] = plan.at(cell).holders  # this row is being removed
            continue
        replicas = kept[cell.pipeline][cell.stage]
        idle, chosen = [w for w in spare if w not in replicas], list[WorkerId]()
        if idle:
            own = {owners[cell], *replicas}
            lacking = view.redundancy.kept - (len(own | running[cell.stage]) - 1)
            held_on = {view.domain(w) for w in own} | places[cell.stage]
            before = plan.at(cell).replicas
            if lacking > 0:
                chosen = nsmallest(lacking, idle, key=lambda w: (w not in before, view.domain(w) in held_on))
            if view.redundancy.kept and len({*held_on, *map(view.domain, chosen)}) == 1:
                elsewhere = [w for w in idle if view.domain(w) not in held_on and load[w] <= view.redundancy.kept]
                chosen += sorted(elsewhere, key=lambda w: w not in before)[:1]
            load.update(chosen)
        filled = [w for c, w in newcomers.items() if cell == Cell(0, c.stage)]
        filled += [w for w in view.beforehand.get(cell, ()) if w in spare]
        target[cell] = tuple(dict.fromkeys((owners[cell], *replicas, *chosen, *filled)))
    return target


def replacement_owners(view: PlanningView) -> Workers:
    """Return new owners for leaving workers' cells, and for all cells but one of each worker that owns several. A spare
    worker that replicates the cell or nothing is chosen, else, if the owner leaves, another worker that stays. A cell
    without a candidate is absent.
    """
    plan, spare = view.plan, view.spare()
    replacements: Workers = {}
    for cell in _to_move(view):
        able = _fittest(view, spare, cell, replacements)
        replacement = next((w for w in able if w in plan.at(cell).replicas), None) or next(
            (w for w in able if all(c == cell for c in plan.replicated_by(w))), None
        )
        if replacement:
            spare.remove(replacement)
        elif plan.at(cell).owner in view.leaving:
            replacement = _stand_in(view, cell)
        if replacement:
            replacements[cell] = replacement
    return replacements


def _stand_in(view: PlanningView, cell: Cell) -> WorkerId | None:
    """Return a new owner for a leaving worker's cell if no spare worker can take it: a replica in sync, else the owner
    of the nearest earlier stage, else the stage's owner in another pipeline. None if they all leave.
    """
    plan, depth = view.plan, len(view.plan.stages)
    shadows = [w for w in plan.at(cell).replicas if (cell, w) in view.synced]
    neighbours = [plan.at(Cell(cell.pipeline, (cell.stage - back) % depth)).owner for back in range(1, depth)]
    siblings = [plan.at(Cell(d, cell.stage)).owner for d in range(plan.target.pipelines)]
    return next((w for w in (*shadows, *neighbours, *siblings) if w not in view.leaving), None)


def _to_move(view: PlanningView) -> list[Cell]:
    """Return the cells that need another owner: a leaving worker's, and all but one of a worker that owns several."""
    plan = view.plan
    cells: list[Cell] = []
    if not view.leaving and not plan.is_doubled:
        return cells
    for worker in dict.fromkeys(plan.at(c).owner for c in plan.cells()):
        owned = [c for c in plan.owned_by(worker) if c.pipeline < plan.target.pipelines]
        if worker in view.leaving:
            cells += owned
        elif len(owned) > 1:
            kept = home(owned, len(plan.stages))
            cells += [c for c in owned if c != kept]
    return cells


def owners_of_new_rows(view: PlanningView) -> Workers:
    """Return an owner for each cell of the pipelines to add; whole pipelines only. Empty if none is to be added, if too
    few workers are spare, or while two layouts may be in force.
    """
    plan, depth = view.plan, len(view.plan.stages)
    if len(plan.layouts) > 1 or view.pipelines <= plan.target.pipelines:
        return {}
    taken = set(replacement_owners(view).values())
    spare = [w for w in view.spare() if w not in taken]
    newcomers: Workers = {}
    others = Counter(view.domain(w) for w in spare)
    rows = range(plan.target.pipelines, min(view.pipelines, plan.target.pipelines + len(spare) // depth))
    groups = _by_row(view, spare, len(rows))
    for cell in (Cell(d, s) for d in rows for s in range(depth)):
        left = groups[cell.pipeline - rows.start]
        filled = (w for w in left if w in plan.at(Cell(0, cell.stage)).replicas)
        nearby = _beside(view, cell, newcomers)
        worker = next(filled, None) or min(
            left, key=lambda w: (bool(plan.replicated_by(w)), view.domain(w) in nearby, -others[view.domain(w)])
        )
        left.remove(worker)
        others[view.domain(worker)] -= 1
        newcomers[cell] = worker
    return newcomers


def _by_row(view: PlanningView, spare: list[WorkerId], count: int) -> list[list[WorkerId]]:
    """Return the workers that each of `count` new pipelines may use: all spare workers or, if the policy packs
    pipelines into zones, the workers that `packed` chooses for that pipeline.
    """
    if not view.spread.packs:
        return [spare] * count
    owners = {view.plan.at(cell).owner for cell in view.plan.cells()}
    taken = {view.live[owner].zone for owner in owners if owner in view.live}
    return packed([view.live[w] for w in spare], len(view.plan.stages), count, view.spread, taken)


def _fittest(view: PlanningView, spare: list[WorkerId], cell: Cell, owners: Mapping[Cell, WorkerId]) -> list[WorkerId]:
    """Return the spare workers, best fit for a cell first.

    If pipelines are packed into zones, workers in the zones with the most workers of the cell's pipeline come first;
    among equals, workers in failure domains without lost or leaving workers; then workers outside the failure domains
    of nearby owners. owners: see `_beside`.
    """
    zones = Counter[str]()
    if view.spread.packs:
        row = [view.plan.at(Cell(cell.pipeline, s)).owner for s in range(len(view.plan.stages)) if s != cell.stage]
        zones.update(view.live[w].zone for w in row if w in view.live)
    doubtful, nearby = view.doubtful(), _beside(view, cell, owners)
    order = {w: (-zones[view.live[w].zone], view.domain(w) in doubtful, view.domain(w) in nearby) for w in spare}
    return sorted(spare, key=order.__getitem__)


def _beside(view: PlanningView, cell: Cell, owners: Mapping[Cell, WorkerId]) -> set[str]:
    """Return the failure domains that a cell's owner should avoid: domains with owners of nearby stages, as far as
    replicas reach, or, with several pipelines and no replicas, of the same stage. owners: override the plan's owners.
    """
    plan, depth = view.plan, len(view.plan.stages)
    reach = min(max(1, view.redundancy.kept), depth - 1)
    around = {(cell.stage + off) % depth for near in range(1, reach + 1) for off in (near, -near)} - {cell.stage}
    cells = [Cell(cell.pipeline, stage) for stage in around]
    if not view.redundancy.kept and plan.target.pipelines > 1:  # these hold the cell's state instead of replicas
        cells = [Cell(d, cell.stage) for d in range(plan.target.pipelines) if d != cell.pipeline]
    known = [owners.get(c) or (plan.at(c).owner if c.pipeline < len(plan.pipelines) else None) for c in cells]
    return {view.domain(w) for w in known if w and w not in view.leaving}
