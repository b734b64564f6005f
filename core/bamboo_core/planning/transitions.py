"""Makers of the next plan: takeovers, draining, replicas, healing, changes of pipelines, schedule and redundancy mode.

Level-triggered: every function looks only at the current state and proposes at most one next plan. Ownership moves only
to a worker that already holds a usable state of the stage, so workers can obey any proposal in the middle of a step.

`resize` changes the number of pipelines or the schedule, with the same stages, and never disturbs a step. To grow, the
workers of a new pipeline first become additional replicas; then the pipeline is added at a step boundary. To shrink,
the last pipelines lose their microbatches at a step boundary; the same plan makes their workers replicas in remaining
pipelines, where they can replace workers that leave or own several cells. Old pipelines and layouts are dropped once a
step is committed under the new layout: until then workers may have to finish a step under the old one.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from bamboo_core import text
from bamboo_core.planning.cell_portions import Cells, is_settled, kept_by, share_out
from bamboo_core.planning.desired import PlanningView, Urgency, desired_holders, owners_of_new_rows, replacement_owners
from bamboo_core.planning.grid import make_layout
from bamboo_core.planning.heirs import heirs_of, lost_runs, siblings
from bamboo_core.planning.plan import Assignment, Cell, Layout, Plan, WorkerId

LEAST_SECONDS: Final = 0.1  # of a step that must remain for a move within it: several times what such a move takes


@dataclass(frozen=True, slots=True)
class StageLost:
    """The lost cells whose state no remaining worker is known to hold."""

    cells: tuple[Cell, ...]


def takeover(view: PlanningView) -> Plan | StageLost | None:
    """Return the plan that at once moves every cell of a lost worker to a holder of its stage. None if no worker of the
    plan is lost; StageLost if a cell has no known holder left (`_candidates`).
    """
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
    """Return the workers that may take over a cell, best first.

    First come workers with an in-sync replica of the cell, and spare workers with one of the stage in any pipeline:
    staying before leaving workers, then workers outside the failure domains of lost or leaving ones, then spare ones.
    The stage's other owners and the workers that report its state follow, also sorted by failure domain.
    """
    plan, doubtful, spare = view.plan, view.doubtful(), set(view.spare())
    replicas = [w for w in plan.at(cell).replicas if w in view.live and (cell, w) in view.synced]
    alike = [Cell(d, cell.stage) for d in range(plan.target.pipelines)]
    idle = [w for one in alike for w in plan.at(one).replicas if w in spare and (one, w) in view.synced]
    first = sorted((*idle, *replicas), key=lambda w: (w in view.leaving, view.domain(w) in doubtful))
    others = [w for w in (*siblings(plan, cell), *view.reported.get(cell.stage, ())) if w in view.live]
    others.sort(key=lambda w: view.domain(w) in doubtful)
    return list(dict.fromkeys((*first, *others)))


def improve(view: PlanningView) -> Plan | None:
    """Return the next plan towards the desired holders: add missing replicas, else move cells to desired owners in
    sync, else end portions, else drop and reorder replicas. None if no change is needed or possible yet.
    """
    plan, lacks = view.plan, _lacks(view)
    cells = {c: plan.at(c) for c in plan.cells()} if lacks.replicas or not lacks.is_settled else {}
    if lacks.replicas:
        for cell, missing in lacks.replicas.items():
            cells[cell] = msgspec.structs.replace(cells[cell], replicas=(*cells[cell].replicas, *missing))
        to = ", ".join(sorted({w for missing in lacks.replicas.values() for w in missing}))
        return next_plan(view, cells, "Replicating", f"the state of stages is copied to {to} while training continues")
    moves = {cell: owner for cell, owner in lacks.owners.items() if (cell, owner) in view.synced}
    if moves:
        return _move(view, moves, boundary=not _pays_now(view, moves))
    if not lacks.is_settled:
        text = "each worker runs its own pipeline from the next step on"
        return next_plan(view, cells, "Settled", text, boundary=True)
    return _trim(view, lacks) if len(plan.layouts) == 1 else None


@dataclass(frozen=True, slots=True)
class _Lacks:
    """The differences between the plan's holders and the desired ones, by cell. replicas: desired holders that the plan
    lacks. owners: desired owners that differ. order: desired replicas that differ, of cells with the desired owner.
    """

    replicas: Mapping[Cell, tuple[WorkerId, ...]]
    owners: Mapping[Cell, WorkerId]
    order: Mapping[Cell, tuple[WorkerId, ...]]
    is_settled: bool  # no portions have to end


def _lacks(view: PlanningView) -> _Lacks:
    lacks = view.remembered.get("lacks")
    if not isinstance(lacks, _Lacks):
        lacks = view.remembered["lacks"] = _found_lacking(view)
    return lacks


def _found_lacking(view: PlanningView) -> _Lacks:
    plan, target = view.plan, desired_holders(view)
    replicas: dict[Cell, tuple[WorkerId, ...]] = {}
    owners: dict[Cell, WorkerId] = {}
    order: dict[Cell, tuple[WorkerId, ...]] = {}
    for cell in plan.cells():
        owner, *others = wanted = target[cell]
        current = plan.at(cell)
        if missing := tuple(w for w in wanted if w != current.owner and w not in current.replicas):
            replicas[cell] = missing
        if owner != current.owner:
            owners[cell] = owner
        elif tuple(others) != current.replicas:
            order[cell] = tuple(others)
    return _Lacks(replicas, owners, order, view.settles or is_settled(plan))


def drain(view: PlanningView) -> Plan | None:
    """Return the plan that moves leaving workers' cells to in-sync replicas: at the next step boundary, or now if a
    worker cannot wait. If there is time, wait until a spare worker has the state, so that no worker has to run two
    stages. None if no worker leaves, or if no cell can move yet.
    """
    if not view.leaving:
        return None
    plan, replacements, spare = view.plan, replacement_owners(view), set(view.spare())
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


def _pays_now(view: PlanningView, moves: Mapping[Cell, WorkerId]) -> bool:
    """Return whether to move these cells within the step instead of at its end.

    True if their owners also run other cells, enough of the step is left, and the new owners can continue where the old
    ones stopped. A pipeline that begins with the next step has no work in this one, and no final gradients for its new
    owner.
    """
    plan = view.plan
    running = min(layout.pipelines for layout in plan.layouts)
    owned = Counter(plan.at(cell).owner for cell in plan.cells())
    return view.remaining > LEAST_SECONDS and all(
        cell.pipeline < running
        and owned[plan.at(cell).owner] > 1
        and kept_by(plan, moves[cell], view.live, cell) is not None
        for cell in moves
    )


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
    """Return the plan in the requested redundancy mode, from the next step on; None if that mode is in force."""
    mode = view.redundancy.mode
    if view.plan.mode is mode:
        return None
    cells = {c: view.plan.at(c) for c in view.plan.cells()}
    plan = next_plan(view, cells, "ModeChanged", f"redundancy {mode} from the next step on", boundary=True)
    return msgspec.structs.replace(plan, mode=mode)


def _trim(view: PlanningView, lacks: _Lacks) -> Plan | None:
    """Return the plan that drops and reorders replicas: each cell whose desired replicas are all in sync keeps only
    these, the shadow first. None if no cell changes.
    """
    ripe = {cell: kept for cell, kept in lacks.order.items() if all((cell, w) in view.synced for w in kept)}
    if not ripe:
        return None
    cells = {cell: view.plan.at(cell) for cell in view.plan.cells()}
    for cell, kept in ripe.items():
        cells[cell] = msgspec.structs.replace(cells[cell], replicas=kept)
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
    """Return the next epoch's plan: the plan in force with these assignments, and with these layouts if given.
    `share_out` adds the portions.
    """
    plan = view.plan
    known = layouts or plan.layouts
    cells = share_out(
        plan, cells, known, leaving=view.leaving, present=view.live, boundary=boundary, elapsed=view.elapsed
    )
    depth = range(len(plan.stages))
    rows = tuple(tuple(cells[Cell(d, s)] for s in depth) for d in range(1 + max(c.pipeline for c in cells)))
    return msgspec.structs.replace(
        plan,
        epoch=plan.epoch + 1,
        pipelines=rows,
        layouts=known,
        workers=tuple(view.live.values()),
        boundary=boundary,
        sources=(),
        reason=reason,
        message=message,
    )


def resize(view: PlanningView) -> Plan | None:
    """Return the plan that starts a change of the number of pipelines or of the schedule. None if no change is
    requested, if an earlier one is unfinished, or if too few spare workers hold the states of new pipelines yet.
    """
    plan = view.plan
    if len(plan.layouts) > 1:
        return None
    if view.pipelines == plan.target.pipelines:
        return _reorder(view) if view.schedule is not plan.target.schedule else None
    return _shrink(view) if view.pipelines < plan.target.pipelines else _grow(view)


def _reorder(view: PlanningView) -> Plan:
    """Return the plan in which the same cells run by another schedule from the next step on. Results stay
    bit-identical.
    """
    plan = view.plan
    cells = {c: plan.at(c) for c in plan.cells()}
    note = f"schedule {view.schedule} from the next step on"
    return next_plan(view, cells, "ScheduleChanged", note, boundary=True, layouts=_layouts(view, plan.target.pipelines))


def _grow(view: PlanningView) -> Plan | None:
    plan, newcomers = view.plan, owners_of_new_rows(view)
    stages = range(len(plan.stages))
    filled = all((Cell(0, cell.stage), w) in view.synced for cell, w in newcomers.items())
    if not newcomers or not filled:
        return None
    cells = {c: plan.at(c) for c in plan.cells()}
    for d in sorted({cell.pipeline for cell in newcomers}):
        row = [newcomers[Cell(d, s)] for s in stages]
        for s, replicas in enumerate(view.replicas_in(row)):
            cells[Cell(d, s)] = Assignment(owner=row[s], replicas=replicas)
    count = plan.target.pipelines + len(newcomers) // len(stages)
    return next_plan(
        view, cells, "Growing", f"{count} pipelines from the next step on", boundary=True, layouts=_layouts(view, count)
    )


def _shrink(view: PlanningView) -> Plan:
    plan, count = view.plan, view.pipelines
    cells = {c: plan.at(c) for c in plan.cells()}
    kept_owners = {plan.at(c).owner for c in plan.cells() if c.pipeline < count}
    for cell in plan.cells():
        worker = plan.at(cell).owner
        if cell.pipeline < count or worker in kept_owners or worker in view.leaving:
            continue
        successor_of = _most_needy(view, cell.stage, count)
        if worker not in cells[successor_of].holders:
            kept = cells[successor_of]
            cells[successor_of] = Assignment(owner=kept.owner, replicas=(*kept.replicas, worker))
    return next_plan(
        view,
        cells,
        "Shrinking",
        f"{text.count(count, 'pipeline')} from the next step on",
        boundary=True,
        layouts=_layouts(view, count),
    )


def _most_needy(view: PlanningView, stage: int, pipelines: int) -> Cell:
    """Return the first of the stage's cells whose owner leaves or owns several cells; else its cell in pipeline 0."""
    cells = [Cell(d, stage) for d in range(pipelines)]
    owner = {c: view.plan.at(c).owner for c in cells}
    return next((c for c in cells if owner[c] in view.leaving or len(view.plan.owned_by(owner[c])) > 1), cells[0])


def _layouts(view: PlanningView, pipelines: int) -> tuple[Layout, ...]:
    plan, target = view.plan, view.plan.target
    microbatches, groups = target.bounds[-1], len(target.bounds) - 1
    return (*plan.layouts, make_layout(target.generation + 1, microbatches, pipelines, groups, view.schedule))


def drop_old_layouts(view: PlanningView) -> Plan | None:
    """Return the plan without old layouts and pipelines; None if it has none or the newest layout has no commit yet."""
    plan = view.plan
    if len(plan.layouts) == 1 or view.generation < plan.target.generation:
        return None
    count = plan.target.pipelines
    cells = {c: plan.at(c) for c in plan.cells() if c.pipeline < count}
    note = f"the job runs {text.count(count, 'pipeline')}"
    if plan.layouts[0].schedule is not plan.target.schedule:
        note += f" by schedule {plan.target.schedule}"
    return next_plan(view, cells, "Resized", note, layouts=(plan.target,))
