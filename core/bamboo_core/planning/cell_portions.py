"""Portions: how several workers share the microbatches of a cell after a takeover. Pure.

Any owner of the stage can run any of the cell's microbatches: the stage's owners in other pipelines, and the new owner.
So the cell's groups of microbatches are divided into portions that these run in addition to their own pipelines.
Groups are the unit because their sums make up the step's sum (`gradient_groups`): the bits are the same, whichever
worker runs them. Boundary tensors go to the worker that runs their microbatch. The cell still has one owner, which adds
the portions' sums and reduces them with the other pipelines'.

A worker keeps the portions that it already runs. Groups that no worker runs any more go to the least loaded workers;
the new owner takes the first ones, since it may have sums of groups that the lost worker had finished.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence

import msgspec

from bamboo_core.planning.plan import Assignment, Cell, Layout, Plan, Portion, WorkerId

Cells = dict[Cell, Assignment]
Range = tuple[int, int]  # microbatches, half-open


def ranges(layout: Layout, pipeline: int, portions: Sequence[Portion]) -> Iterator[tuple[WorkerId, Range]]:
    """Yield the worker and the half-open range of microbatches of each portion of a cell, in order. A range has whole
    groups; empty portions are skipped. portions: at least one.
    """
    share, units = layout.shares[pipeline], portions[-1].end
    groups = share.end - share.first
    for portion in portions:
        first, end = (share.first + groups * unit // units for unit in (portion.first, portion.end))
        if first < end:
            yield portion.worker, (layout.bounds[first], layout.bounds[end])


def groups_of(layouts: Sequence[Layout], pipeline: int) -> int:
    """Return the number of gradient groups that a pipeline runs in a step, under the newest layout that has the
    pipeline. layouts: oldest first.
    """
    layout = next(layout for layout in reversed(layouts) if pipeline < layout.pipelines)
    share = layout.shares[pipeline]
    return share.end - share.first


def runner(assignment: Assignment, layout: Layout, pipeline: int, microbatch: int) -> WorkerId:
    """Return the worker that runs a microbatch of a cell: its portion's worker, or the owner if the cell has no
    portions.
    """
    shared = ranges(layout, pipeline, assignment.portions) if assignment.portions else ()
    return next((worker for worker, (first, end) in shared if first <= microbatch < end), assignment.owner)


def share_out(
    plan: Plan,
    cells: Mapping[Cell, Assignment],
    layouts: Sequence[Layout],
    *,
    leaving: Collection[WorkerId],
    present: Container[WorkerId],
    boundary: bool,
    elapsed: float = 0.0,
) -> Cells:
    """Divide some cells' microbatches into portions for several workers. Return all assignments with the portions.

    A cell may be shared if its owner owns several cells or, until the end of the step, if its owner has changed within
    the step. Workers with several devices have no portions. plan: in force. cells, layouts: the next plan's. leaving:
    workers that get no new portions if others can take them. present: workers that are not lost. boundary: whether the
    next plan takes effect with a new step. elapsed: the part of the current step that has passed, 0 to 1.
    """
    if plan.device_layers:
        return {c: msgspec.structs.replace(a, portions=()) if a.portions else a for c, a in cells.items()}
    owned = Counter(assignment.owner for assignment in cells.values())
    owners = [dict.fromkeys(a.owner for c, a in cells.items() if c.stage == s) for s in range(len(plan.stages))]
    before, load = {}, Counter[WorkerId]()
    for cell, assignment in cells.items():
        groups = groups_of(layouts, cell.pipeline)
        known = plan.at(cell) if plan.has(cell) else assignment
        together = owned[assignment.owner] > 1
        if not boundary:
            together = together or known.owner != assignment.owner or bool(known.portions)
        before[cell] = known.portions or (Portion(worker=known.owner, first=0, end=groups),) if together else ()
        for portion in before[cell] or (Portion(worker=assignment.owner, first=0, end=groups),):
            load[portion.worker] += portion.end - portion.first
    shared = {}
    for cell, assignment in cells.items():
        able = owners[cell.stage]
        runners = [w for w in able if w not in leaving] or list(able)
        groups, known = groups_of(layouts, cell.pipeline), plan.at(cell) if plan.has(cell) else assignment
        keeps = not boundary and groups > 1 and kept_by(plan, assignment.owner, present, cell) is not None
        kept = max(0, int(elapsed * groups) - 1) if keeps else 0
        portions = _given_out(before[cell], assignment.owner, able, runners, load, kept)
        alone = len(portions) == 1 and portions[0].worker == assignment.owner
        if alone and not keeps and (boundary or not known.portions):
            portions = ()  # the owner continues the step as it began it
        shared[cell] = msgspec.structs.replace(assignment, portions=portions)
    return shared


def without_portions(plan: Plan) -> Plan:
    """Return the plan with all portions removed, or unchanged if it has only one stage."""
    if len(plan.stages) == 1 or not any(a.portions for row in plan.pipelines for a in row):
        return plan
    alone = tuple(tuple(msgspec.structs.replace(a, portions=()) for a in row) for row in plan.pipelines)
    return msgspec.structs.replace(plan, pipelines=alone)


def changed_cells(plan: Plan, old: Plan) -> set[Cell]:
    """Return the cells whose owner or portions under `plan` differ from `old`. Cells that `old` does not have are left
    out.
    """
    return {c for c in plan.cells() if old.has(c) and not plan.at(c).is_run_as(old.at(c))}


def is_settled(plan: Plan) -> bool:
    """Return whether each cell with portions belongs to a worker that owns several cells; True if no cell has any."""
    owned = Counter(plan.at(cell).owner for cell in plan.cells())
    return not any(plan.at(cell).portions and owned[plan.at(cell).owner] == 1 for cell in plan.cells())


def keeper(plan: Plan, cell: Cell) -> WorkerId | None:
    """Return the worker that keeps a copy of the gradient sums of a cell's finished groups: the nearest other owner of
    an earlier stage in its pipeline.

    The last stage counts as the one before the first. None if workers have several devices, if one worker owns the
    whole pipeline, if no other worker holds the stage's state and so could continue, or if the keeper would be in
    another zone, because traffic between zones costs money.
    """
    (d, s), stages, owner = cell, len(plan.stages), plan.at(cell).owner
    if plan.device_layers or plan.holders_of(s) == {owner}:
        return None
    others = (plan.at(Cell(d, (s - way) % stages)).owner for way in range(1, stages))
    candidate = next((worker for worker in others if worker != owner), None)
    if candidate is None:
        return None
    return candidate if len({peer.zone for peer in map(plan.peer, (owner, candidate)) if peer}) < 2 else None


def kept_by(plan: Plan, new: WorkerId, present: Container[WorkerId], cell: Cell) -> WorkerId | None:
    """Return the worker from which a cell's new owner gets the gradient sums of finished groups: the old owner, else
    the cell's `keeper`. None if the old owner is lost and no keeper is left, the owner stays, the old plan lacks the
    cell, or workers have several devices. plan: the old plan. new: the new owner. present: workers that are not lost.
    """
    if not plan.has(cell) or new == plan.at(cell).owner or plan.device_layers:
        return None
    source = plan.at(cell).owner if plan.at(cell).owner in present else keeper(plan, cell)
    return source if source in present else None


def _given_out(
    before: Sequence[Portion],
    owner: WorkerId,
    owners: Collection[WorkerId],
    runners: Sequence[WorkerId],
    load: Counter[WorkerId],
    kept: int,
) -> tuple[Portion, ...]:
    """Return a cell's next portions: `before`, but portions of workers not in `owners` are divided among `runners`.

    load: the number of groups that each worker runs; it is updated. kept: the number of first groups that the owner
    need not run, because it probably has their sums.
    """
    if not before:
        return ()
    portions: list[Portion] = []
    in_turn = sorted(runners, key=lambda w: w != owner)
    for portion in before:
        if portion.worker in owners:
            portions.append(portion)
            continue
        counts: Counter[WorkerId] = Counter()
        if portion.first == 0 and owner in runners:
            counts[owner] = min(kept, portion.end)
        for _ in range(portion.first + counts.total(), portion.end):
            worker = min(in_turn, key=load.__getitem__)
            load[worker] += 1
            counts[worker] += 1
        first = portion.first
        for worker in (w for w in in_turn if counts[w]):
            portions.append(Portion(worker=worker, first=first, end=first + counts[worker]))
            first += counts[worker]
    return tuple(portions)
