"""Resizing: the plans that lead to another number of pipelines of the same stages, or to another schedule.

A resize never disturbs a step. Growing first fills the newcomers as additional replicas, then adds their row at a step
boundary. Shrinking takes the microbatches away from the last rows at a step boundary; their workers have become
replicas of the remaining rows, and heal those. The old rows and layouts are dropped once a step is committed under the
new layout: until then another worker may have to finish a step under the old one. A change of schedule works the same
way.
"""

from bamboo_core import text
from bamboo_core.planning.desired import PlanningView, owners_of_new_rows
from bamboo_core.planning.grid import make_layout
from bamboo_core.planning.plan import Assignment, Cell, Layout, Plan
from bamboo_core.planning.transitions import next_plan


def resize(view: PlanningView) -> Plan | None:
    """Return the plan that starts a change of the number of pipelines or of the schedule, once all it needs is in
    place.
    """
    plan = view.plan
    if len(plan.layouts) > 1:
        return None
    if view.pipelines == plan.target.pipelines:
        return _reorder(view) if view.schedule is not plan.target.schedule else None
    return _shrink(view) if view.pipelines < plan.target.pipelines else _grow(view)


def _reorder(view: PlanningView) -> Plan:
    """Return the plan in which the same cells run by another schedule from the next step on. It changes no bit."""
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
    """Return the cell of a stage whose owner leaves or has several cells; else the first one."""
    cells = [Cell(d, stage) for d in range(pipelines)]
    owner = {c: view.plan.at(c).owner for c in cells}
    return next((c for c in cells if owner[c] in view.leaving or len(view.plan.owned_by(owner[c])) > 1), cells[0])


def _layouts(view: PlanningView, pipelines: int) -> tuple[Layout, ...]:
    plan, target = view.plan, view.plan.target
    microbatches, groups = sum(map(len, target.split)), len(target.groups) - 1 if target.groups else None
    return (*plan.layouts, make_layout(target.generation + 1, microbatches, pipelines, groups, view.schedule))


def drop_old_layouts(view: PlanningView) -> Plan | None:
    """Drop old layouts and rows once a step has been committed under the newest layout."""
    plan = view.plan
    if len(plan.layouts) == 1 or view.generation < plan.target.generation:
        return None
    count = plan.target.pipelines
    cells = {c: plan.at(c) for c in plan.cells() if c.pipeline < count}
    note = f"the job runs {text.count(count, 'pipeline')}"
    if plan.layouts[0].schedule is not plan.target.schedule:
        note += f" by schedule {plan.target.schedule}"
    return next_plan(view, cells, "Resized", note, layouts=(plan.target,))
