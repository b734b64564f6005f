"""Who should hold which cell, given who is there: what the next plans lead to, one step at a time. Pure."""

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
    """How much time a leaving worker has: enough to fill another one, or to end the step, or none at all."""

    NONE = auto()
    SOON = auto()
    NOW = auto()


@dataclass(frozen=True, kw_only=True)
class PlanningView:
    """What a reconciliation looks at."""

    plan: Plan
    live: Mapping[WorkerId, Peer]  # in order of joining
    leaving: Mapping[WorkerId, Urgency]  # those that have a notice
    synced: Synced
    redundancy: RedundancySpec  # the one asked for
    pipelines: int  # how many there should be
    generation: int  # the newest layout that a step has been committed with (-1: none yet)
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B  # by which they should run
    spread: SpreadPolicy = SpreadPolicy.INTERLEAVE
    # workers that say that they hold a stage's state at a usable version, by stage
    reported: Mapping[int, tuple[WorkerId, ...]] = field(default_factory=dict)
    # the share of the step in progress that is over, from 0 to 1, as far as that is known
    elapsed: float = field(default=0.0, compare=False)
    remaining: float = field(default=0.0, compare=False)  # seconds of it that are left; infinite before that is known
    settles: bool = False  # the next step begins without portions of the plan
    # spare workers that keep replicas until the layers are split anew, since they will need them then
    beforehand: Mapping[Cell, tuple[WorkerId, ...]] = field(default_factory=dict)
    # what was found out for this view, by name
    remembered: dict[str, Any] = field(init=False, default_factory=dict, compare=False, repr=False)

    def after(self, before: "PlanningView | None") -> "PlanningView":
        """This view, remembering what one before it does that differs in nothing but which replicas are in sync.

        Nobody may be leaving: then who should hold what depends on that, too.
        """
        if before is not None and not self.leaving and self == replace(before, synced=self.synced):
            self.remembered.update(before.remembered)
        return self

    def replicas_in(self, row: Sequence[WorkerId]) -> tuple[tuple[WorkerId, ...], ...]:
        """The replicas of each stage of a pipeline with these workers: as many as are asked for, or as there are."""
        return replicas_in(row, self.redundancy.kept, self.live, self.leaving)

    def spare(self) -> list[WorkerId]:
        """Workers that own nothing and stay; those that are being prepared for a part come first."""
        busy = self.plan.holders()
        owners = self.plan.owners()
        spare = [w for w in self.live if w not in owners and w not in self.leaving]
        return sorted(spare, key=lambda w: w not in busy)

    def domain(self, worker: WorkerId) -> str:
        """What it is lost with; see `Peer`. Of a worker of the plan, too, that is not there any more."""
        known = self.live.get(worker) or self.plan.peer(worker)
        return known.failure_domain if known else f"/{worker}"

    def doubtful(self) -> set[str]:
        """What workers are leaving from, or have been lost with: the others there may be next."""
        gone = self.plan.worker_ids() - self.live.keys()
        return {self.domain(w) for w in (*gone, *self.leaving)}


def desired_holders(view: PlanningView) -> dict[Cell, tuple[WorkerId, ...]]:
    """The holders that each cell should have, given who is there: its owner, its shadow, and who is to be filled.

    Those are too few, or all on one node: then spare workers are, if they have room for one replica more than usual.
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
            target[cell] = plan.at(cell).holders  # this row is on its way out
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
    """Who should own the cells that need another owner: spare workers, else somebody who stays."""
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
    """Who should own a leaving worker's cell when nobody is spare.

    Its shadow, else the nearest neighbour that stays, else the owner of the same stage in another pipeline.
    """
    plan, depth = view.plan, len(view.plan.stages)
    shadows = [w for w in plan.at(cell).replicas if (cell, w) in view.synced]
    neighbours = [plan.at(Cell(cell.pipeline, (cell.stage - back) % depth)).owner for back in range(1, depth)]
    siblings = [plan.at(Cell(d, cell.stage)).owner for d in range(plan.target.pipelines)]
    return next((w for w in (*shadows, *neighbours, *siblings) if w not in view.leaving), None)


def _to_move(view: PlanningView) -> list[Cell]:
    """Cells that should find another owner: a leaving worker's, and all but one of a doubled worker's."""
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
    """The owners of the cells of new rows if the job should grow; whole rows only."""
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
        beside = _beside(view, cell, newcomers)
        worker = next(filled, None) or min(
            left, key=lambda w: (bool(plan.replicated_by(w)), view.domain(w) in beside, -others[view.domain(w)])
        )
        left.remove(worker)
        others[view.domain(worker)] -= 1
        newcomers[cell] = worker
    return newcomers


def _by_row(view: PlanningView, spare: list[WorkerId], count: int) -> list[list[WorkerId]]:
    """The workers from whom each of so many new rows may choose: all that are left, or those of a zone."""
    if not view.spread.packs:
        return [spare] * count
    owners = {view.plan.at(cell).owner for cell in view.plan.cells()}
    taken = {view.live[owner].zone for owner in owners if owner in view.live}
    return packed([view.live[w] for w in spare], len(view.plan.stages), count, view.spread, taken)


def _fittest(view: PlanningView, spare: list[WorkerId], cell: Cell, owners: Mapping[Cell, WorkerId]) -> list[WorkerId]:
    """The spare workers in the order in which they fit a cell: first, if pipelines are packed, those in the zone of
    most of the cell's pipeline; then those on nodes that nobody leaves, and on others than the owners around the cell.
    owners: as for `_beside`.
    """
    zones = Counter[str]()
    if view.spread.packs:
        row = [view.plan.at(Cell(cell.pipeline, s)).owner for s in range(len(view.plan.stages)) if s != cell.stage]
        zones.update(view.live[w].zone for w in row if w in view.live)
    doubtful, beside = view.doubtful(), _beside(view, cell, owners)
    found = {w: (-zones[view.live[w].zone], view.domain(w) in doubtful, view.domain(w) in beside) for w in spare}
    return sorted(spare, key=found.__getitem__)


def _beside(view: PlanningView, cell: Cell, owners: Mapping[Cell, WorkerId]) -> set[str]:
    """The domains of the owners that a cell's own should not be with: of the stages around it, as far as replicas go.
    owners: of cells, before what the plan says.
    """
    plan, depth = view.plan, len(view.plan.stages)
    reach = min(max(1, view.redundancy.kept), depth - 1)
    around = {(cell.stage + off) % depth for near in range(1, reach + 1) for off in (near, -near)} - {cell.stage}
    cells = [Cell(cell.pipeline, stage) for stage in around]
    if not view.redundancy.kept and plan.target.pipelines > 1:  # these hold its copies
        cells = [Cell(d, cell.stage) for d in range(plan.target.pipelines) if d != cell.pipeline]
    known = [owners.get(c) or (plan.at(c).owner if c.pipeline < len(plan.pipelines) else None) for c in cells]
    return {view.domain(w) for w in known if w and w not in view.leaving}
