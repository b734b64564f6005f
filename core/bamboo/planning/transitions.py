"""From the plan in force to the next one: takeover, drain, re-protection, healing, and the return to the target.

Level-triggered: every function looks only at what is, and proposes at most one next plan. Ownership moves only to a
worker that already holds an in-sync replica of the stage, so that any proposal can be obeyed in the middle of a step.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from bamboo.job.placement_spec import SpreadPolicy
from bamboo.job.spec import RedundancySpec
from bamboo.planning.grid import kept_on_standby
from bamboo.planning.heirs import Synced, heirs_of, home, lost_runs, siblings
from bamboo.planning.plan import Assignment, Cell, Layout, Peer, Plan, WorkerId
from bamboo.planning.portions import Cells, is_settled, share_out
from bamboo.planning.ring import packed, replicas_in


class Urgency(Enum):
    """How much time a leaving worker has: enough to fill another one, or to end the step, or none at all."""

    NONE = auto()
    SOON = auto()
    NOW = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningView:
    """What a reconciliation looks at.

    live: in order of joining; leaving: those that have a notice; pipelines: how many there should be;
    generation: the newest layout that a step has been committed with (-1: none yet); reported: workers that say that
    they hold a stage's state at a usable version, by stage; on_standby: of how many stages a spare worker keeps
    replicas, so that it can take one of them over.
    """

    plan: Plan
    live: Mapping[WorkerId, Peer]
    leaving: Mapping[WorkerId, Urgency]
    synced: Synced
    redundancy: RedundancySpec  # the one asked for
    pipelines: int
    generation: int
    spread: SpreadPolicy = SpreadPolicy.INTERLEAVE
    reported: Mapping[int, tuple[WorkerId, ...]] = field(default_factory=dict)
    on_standby: int = 0

    def replicas_in(self, row: Sequence[WorkerId]) -> tuple[tuple[WorkerId, ...], ...]:
        """Of the stages of a pipeline with these workers, or of the shards of one-stage pipelines with these owners: as
        many as are asked for, or as there are.
        """
        return replicas_in(row, self.redundancy.kept, self.live, self.leaving)

    def spare(self) -> list[WorkerId]:
        """Workers that own nothing and stay; those that are being prepared for a part come first."""
        busy = self.plan.holders()
        owners = {self.plan.at(c).owner for c in self.plan.cells()}
        spare = [w for w in self.live if w not in owners and w not in self.leaving]
        return sorted(spare, key=lambda w: w not in busy)

    def newcomers(self) -> dict[Cell, WorkerId]:
        """If the job should grow: who will own which cell of the new rows; whole rows only."""
        plan, depth = self.plan, len(self.plan.stages)
        if plan.shards or len(plan.layouts) > 1 or self.pipelines <= plan.target.pipelines:
            return {}
        spare = [w for w in self.spare() if w not in _replacements(self).values()]
        newcomers: Workers = {}
        others = Counter(self.domain(w) for w in spare)
        rows = range(plan.target.pipelines, min(self.pipelines, plan.target.pipelines + len(spare) // depth))
        groups = self._by_row(spare, len(rows))
        for cell in (Cell(d, s) for d in rows for s in range(depth)):
            left = groups[cell.pipeline - rows.start]
            filled = (w for w in left if w in plan.at(Cell(0, cell.stage)).replicas)
            beside = self._beside(cell, newcomers)
            worker = next(filled, None) or min(
                left, key=lambda w: (bool(plan.replicated_by(w)), self.domain(w) in beside, -others[self.domain(w)])
            )
            left.remove(worker)
            others[self.domain(worker)] -= 1
            newcomers[cell] = worker
        return newcomers

    def domain(self, worker: WorkerId) -> str:
        """What it is lost with; see `Peer`. Of a worker of the plan, too, that is not there any more."""
        known = self.live.get(worker) or next((p for p in self.plan.workers if p.worker == worker), None)
        return known.failure_domain if known else f"/{worker}"

    def doubtful(self) -> set[str]:
        """What workers are leaving from, or have been lost with: the others there may be next."""
        gone = self.plan.worker_ids() - self.live.keys()
        return {self.domain(w) for w in (*gone, *self.leaving)}

    def _beside(self, cell: Cell, owners: Mapping[Cell, WorkerId]) -> set[str]:
        """Where the owners are that a cell's own should not be with: of the stages around it, as far as replicas go.

        owners: of cells, before what the plan says.
        """
        plan, depth = self.plan, len(self.plan.stages)
        reach = min(max(1, self.redundancy.kept), depth - 1)
        around = {(cell.stage + off) % depth for near in range(1, reach + 1) for off in (near, -near)} - {cell.stage}
        cells = [Cell(cell.pipeline, stage) for stage in around]
        known = [owners.get(c) or (plan.at(c).owner if c.pipeline < len(plan.pipelines) else None) for c in cells]
        return {self.domain(w) for w in known if w and w not in self.leaving}

    def _by_row(self, spare: list[WorkerId], count: int) -> list[list[WorkerId]]:
        """For each of so many new rows the workers of whom it may choose: all that are left, or those of a zone."""
        if not self.spread.packs:
            return [spare] * count
        owners = {self.plan.at(cell).owner for cell in self.plan.cells()}
        taken = {self.live[owner].zone for owner in owners if owner in self.live}
        return packed([self.live[w] for w in spare], len(self.plan.stages), count, self.spread, taken)

    def fittest(self, spare: list[WorkerId], cell: Cell, owners: Mapping[Cell, WorkerId]) -> list[WorkerId]:
        """Those first, if pipelines are packed, that are in the zone of most of the cell's pipeline; then those on
        nodes that nobody leaves, and on others than the owners around the cell. owners: as for `_beside`.
        """
        zones = Counter[str]()
        if self.spread.packs:
            row = [self.plan.at(Cell(cell.pipeline, s)).owner for s in range(len(self.plan.stages)) if s != cell.stage]
            zones.update(self.live[w].zone for w in row if w in self.live)
        doubtful, beside = self.doubtful(), self._beside(cell, owners)
        found = {w: (-zones[self.live[w].zone], self.domain(w) in doubtful, self.domain(w) in beside) for w in spare}
        return sorted(spare, key=found.__getitem__)


@dataclass(frozen=True, slots=True)
class StageLost:
    """No worker holds these cells' state any more."""

    cells: tuple[Cell, ...]


Workers = dict[Cell, WorkerId]


def takeover(view: PlanningView) -> Plan | StageLost | None:
    """Move every cell of a lost worker to a holder of its stage, at once."""
    plan = view.plan
    lost = plan.holders() - view.live.keys()
    if not lost and plan.worker_ids() <= view.live.keys():
        return None
    bereft = [c for c in plan.cells() if plan.at(c).owner not in view.live]
    heirs: dict[Cell, WorkerId | None] = {}
    for run in lost_runs(plan, bereft):
        heirs |= zip(run, heirs_of(run, lambda cell: _candidates(view, cell)), strict=True)
    if gone := [c for c in bereft if heirs[c] is None]:
        return StageLost(tuple(gone))
    cells: Cells = {}
    for cell in plan.cells():
        owner = heirs.get(cell) or plan.at(cell).owner
        replicas = tuple(w for w in plan.at(cell).replicas if w in view.live and w != owner)
        cells[cell] = Assignment(owner=owner, replicas=replicas)
    moved = [(c, heirs[c]) for c in bereft]
    takeovers = ", ".join(f"{successor} takes over stage {c.stage} of pipeline {c.pipeline}" for c, successor in moved)
    message = f"lost {', '.join(sorted(lost))}; {takeovers or 'it ran no stage, so nothing has to move'}"
    if not lost:
        message = "a worker that ran no stage is gone"
    after = next_plan(view, cells, "Takeover" if moved else "WorkerRemoved", message)
    together = sorted({p.worker for c, _ in moved for p in after.at(c).portions})
    if together:
        message += f"; its microbatches are shared by {', '.join(together)}"
    return msgspec.structs.replace(after, message=message)


def _candidates(view: PlanningView, cell: Cell) -> list[WorkerId]:
    """In-sync replicas: staying ones first, then those that are not where somebody has been lost, then spare workers,
    of any pipeline. Else owners of the same stage in other pipelines, or who has it, in the same order of places.
    """
    plan, doubtful, spare = view.plan, view.doubtful(), set(view.spare())
    replicas = [w for w in plan.at(cell).replicas if w in view.live and (cell, w) in view.synced]
    alike = [cell] if plan.shards else [Cell(d, cell.stage) for d in range(plan.target.pipelines)]
    idle = [w for one in alike for w in plan.at(one).replicas if w in spare and (one, w) in view.synced]
    first = sorted((*idle, *replicas), key=lambda w: (w in view.leaving, view.domain(w) in doubtful))
    others = [w for w in (*siblings(plan, cell), *view.reported.get(plan.state_of(cell), ())) if w in view.live]
    others.sort(key=lambda w: view.domain(w) in doubtful)
    return list(dict.fromkeys((*first, *others)))


def improve(view: PlanningView) -> Plan | None:
    """One step towards the target: replicas where they are missing, owners where they belong, nothing superfluous."""
    plan, target = view.plan, _target(view)
    wanted: Cells = {}
    for cell in plan.cells():
        missing = [w for w in target[cell] if w not in plan.at(cell).holders]
        wanted[cell] = msgspec.structs.replace(plan.at(cell), replicas=(*plan.at(cell).replicas, *missing))
    if any(wanted[c] != plan.at(c) for c in plan.cells()):
        names = sorted({w for c in plan.cells() for w in wanted[c].replicas if w not in plan.at(c).replicas})
        to = ", ".join(names) or "other workers"
        return next_plan(view, wanted, "Replicating", f"the state of stages is copied to {to} while training continues")
    moves = {
        cell: target[cell][0]
        for cell in plan.cells()
        if target[cell][0] != plan.at(cell).owner and (cell, target[cell][0]) in view.synced
    }
    if moves:
        return _move(view, moves)
    if not is_settled(plan):
        cells = {c: plan.at(c) for c in plan.cells()}
        text = "each worker runs its own pipeline from the next step on"
        return next_plan(view, cells, "Settled", text, boundary=True)
    return _trim(view, target) if len(plan.layouts) == 1 else None


def _target(view: PlanningView) -> dict[Cell, tuple[WorkerId, ...]]:
    """The holders that each cell should have, given who is there: its owner, its shadow, and who is to be filled.

    Those are too few, or all on one node: then spare workers are, if they have room for one replica more than usual.
    """
    plan = view.plan
    replacements, newcomers = _replacements(view), view.newcomers()
    taken = {*replacements.values(), *newcomers.values()}
    spare = [w for w in view.spare() if w not in taken]
    owners = {c: replacements.get(c) or plan.at(c).owner for c in plan.cells()}
    rows = [[owners[Cell(d, s)] for s in range(len(plan.stages))] for d in range(plan.target.pipelines)]
    kept = [view.replicas_in(row) for row in rows]
    if plan.shards:
        kept = [(replicas,) for replicas in view.replicas_in([row[0] for row in rows])]
    target, load = {}, Counter[WorkerId]()
    for cell in plan.cells():
        if cell.pipeline >= plan.target.pipelines:
            target[cell] = plan.at(cell).holders  # this row is on its way out
            continue
        replicas = kept[cell.pipeline][cell.stage]
        others = () if plan.shards else [owners[Cell(d, cell.stage)] for d in range(plan.target.pipelines)]
        holders = {owners[cell], *replicas, *others}
        lacking = view.redundancy.kept - (len(holders) - 1)
        held_on = {view.domain(w) for w in holders}
        idle = [w for w in spare if w not in replicas]
        idle.sort(key=lambda w: (w not in plan.at(cell).replicas, view.domain(w) in held_on))
        chosen = idle[: max(0, lacking)]
        if view.redundancy.kept and len({*held_on, *map(view.domain, chosen)}) == 1:
            elsewhere = [w for w in idle if view.domain(w) not in held_on and load[w] <= view.redundancy.kept]
            chosen += elsewhere[:1]
        load.update(chosen)
        filled = [w for c, w in newcomers.items() if cell == Cell(0, c.stage)]
        ready = spare[:1] if cell in _on_standby(view) else []
        target[cell] = tuple(dict.fromkeys((owners[cell], *replicas, *chosen, *filled, *ready)))
    return target


def _on_standby(view: PlanningView) -> tuple[Cell, ...]:
    """Of which cells a spare worker keeps replicas, if there is one."""
    return tuple(Cell(0, s) for s in range(kept_on_standby(view.on_standby, view.redundancy, len(view.plan.stages))))


def _replacements(view: PlanningView) -> Workers:
    """Who should own the cells that need another owner: spare workers, else somebody who stays."""
    plan, spare = view.plan, view.spare()
    replacements: Workers = {}
    kept_ready = set(_on_standby(view))
    for cell in _to_move(view):
        able = view.fittest(spare, cell, replacements)
        replacement = next((w for w in able if w in plan.at(cell).replicas), None) or next(
            (w for w in able if all(c == cell or c in kept_ready for c in plan.replicated_by(w))), None
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
    for worker in dict.fromkeys(plan.at(c).owner for c in plan.cells()):
        owned = [c for c in plan.owned_by(worker) if c.pipeline < plan.target.pipelines]
        if worker in view.leaving:
            cells += owned
        elif len(owned) > 1:
            kept = home(owned, len(plan.stages))
            cells += [c for c in owned if c != kept]
    return cells


def drain(view: PlanningView) -> Plan | None:
    """A leaving worker hands its cells to in-sync replicas at the next step boundary, or now if it cannot wait.

    If there is time, it waits for a spare worker to be filled, so that nobody has to run two stages.
    """
    plan, replacements, spare = view.plan, _replacements(view), set(view.spare())
    doubtful = view.doubtful()
    moves = {}
    for cell in plan.cells():
        owner = plan.at(cell).owner
        if owner not in view.leaving:
            continue
        successors = [w for w in plan.at(cell).replicas if w not in view.leaving and (cell, w) in view.synced]
        successors.sort(key=lambda w: (view.domain(w) in doubtful, w not in spare))
        waits = replacements.get(cell) in spare and view.leaving[owner] is Urgency.NONE
        if successors and (successors[0] in spare or not waits):
            moves[cell] = successors[0]
    now = any(view.leaving[plan.at(c).owner] is Urgency.NOW for c in moves)
    return _move(view, moves, boundary=not now) if moves else None


def _move(view: PlanningView, moves: Mapping[Cell, WorkerId], boundary: bool = True) -> Plan:
    plan = view.plan
    cells: Cells = {}
    for cell in plan.cells():
        assignment = plan.at(cell)
        if cell in moves:
            rest = tuple(w for w in assignment.replicas if w != moves[cell])
            cells[cell] = Assignment(owner=moves[cell], replicas=(assignment.owner, *rest))
        else:
            cells[cell] = assignment
    reason = "PlannedTakeover" if any(plan.at(c).owner in view.leaving for c in moves) else "Healed"
    takeovers = ", ".join(f"{w} takes stage {c.stage} of pipeline {c.pipeline}" for c, w in moves.items())
    return next_plan(view, cells, reason, f"{takeovers} {'at the next step' if boundary else 'now'}", boundary=boundary)


def switch_mode(view: PlanningView) -> Plan | None:
    """Another redundancy mode was asked for; it begins with the next step."""
    mode = view.redundancy.mode
    if view.plan.mode is mode:
        return None
    cells = {c: view.plan.at(c) for c in view.plan.cells()}
    plan = next_plan(view, cells, "ModeChanged", f"redundancy {mode} from the next step on", boundary=True)
    return msgspec.structs.replace(plan, mode=mode)


def _trim(view: PlanningView, target: Mapping[Cell, tuple[WorkerId, ...]]) -> Plan | None:
    """Drop replicas that are not wanted, once those that are wanted are in sync, and put the right shadow first."""
    plan = view.plan
    cells: Cells = {}
    for cell in plan.cells():
        owner, *others = target[cell]
        assignment = plan.at(cell)
        settled = assignment.owner == owner and all((cell, w) in view.synced for w in others)
        kept = tuple(others) if settled else assignment.replicas
        cells[cell] = msgspec.structs.replace(assignment, replicas=kept)
    if all(cells[c] == plan.at(c) for c in plan.cells()):
        return None
    return next_plan(view, cells, "Settled", "copies of stages that are not needed any more are dropped")


def next_plan(
    view: PlanningView,
    cells: Cells,
    reason: str,
    message: str,
    *,
    boundary: bool = False,
    layouts: tuple[Layout, ...] | None = None,
) -> Plan:
    """The plan in force with other assignments (and layouts), one epoch later.

    Who runs several pipelines of one stage shares them with the others' workers.
    """
    plan = view.plan
    cells = share_out(plan, cells, layouts or plan.layouts, leaving=view.leaving, boundary=boundary)
    depth = range(len(plan.stages))
    rows = tuple(tuple(cells[Cell(d, s)] for s in depth) for d in range(1 + max(c.pipeline for c in cells)))
    return msgspec.structs.replace(
        plan,
        epoch=plan.epoch + 1,
        pipelines=rows,
        layouts=layouts or plan.layouts,
        workers=tuple(view.live.values()),
        boundary=boundary,
        sources=(),
        reason=reason,
        message=message,
    )
