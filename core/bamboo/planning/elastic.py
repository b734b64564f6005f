"""How many pipelines the job runs: follows the workers that are there, within the bounds of the specification.

A resize never disturbs a step. Growing first fills the newcomers as additional replicas, then adds their row at a step
boundary. Shrinking takes the share away from the last rows at a step boundary; their workers have become replicas of
the rows that stay, and heal those. The rows and the old layouts are dropped once a step has been committed with the
new layout, because until then a step under the old one may still have to be finished by somebody else.
"""

from bamboo import text
from bamboo.job.spec import JobSpec
from bamboo.planning.desired import PlanningView, owners_of_new_rows
from bamboo.planning.grid import make_layout
from bamboo.planning.plan import Assignment, Cell, Layout, Plan
from bamboo.planning.transitions import next_plan


def desired_pipelines(staying: int, spec: JobSpec) -> int:
    """As many as the staying workers fill, within the bounds."""
    most = min(spec.elastic.max_pipelines, spec.training.most_pipelines)
    return max(spec.elastic.min_pipelines, min(most, staying // spec.topology.stages))


def resize(view: PlanningView) -> Plan | None:
    """Begin to run with another number of pipelines, if everything that it takes is in place."""
    plan = view.plan
    if len(plan.layouts) > 1 or view.pipelines == plan.target.pipelines:
        return None
    return _shrink(view) if view.pipelines < plan.target.pipelines else _grow(view)


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
        view, cells, "Growing", f"{count} pipelines from the next step on", boundary=True, layouts=_layouts(plan, count)
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
        view, cells, "Shrinking", f"{text.count(count, 'pipeline')} from the next step on", boundary=True,
        layouts=_layouts(plan, count),
    )  # fmt: skip


def _most_needy(view: PlanningView, stage: int, pipelines: int) -> Cell:
    """The cell of a stage whose owner leaves or has more than one cell; else the first one."""
    cells = [Cell(d, stage) for d in range(pipelines)]
    owner = {c: view.plan.at(c).owner for c in cells}
    return next((c for c in cells if owner[c] in view.leaving or len(view.plan.owned_by(owner[c])) > 1), cells[0])


def _layouts(plan: Plan, pipelines: int) -> tuple[Layout, ...]:
    target = plan.target
    microbatches, groups = sum(map(len, target.split)), len(target.groups) - 1 if target.groups else None
    return (*plan.layouts, make_layout(target.generation + 1, microbatches, pipelines, groups))


def drop_old_layouts(view: PlanningView) -> Plan | None:
    """Drop old layouts and rows once a step has been committed under the newest layout."""
    plan = view.plan
    if len(plan.layouts) == 1 or view.generation < plan.target.generation:
        return None
    count = plan.target.pipelines
    cells = {c: plan.at(c) for c in plan.cells() if c.pipeline < count}
    return next_plan(view, cells, "Resized", f"the job runs {text.count(count, 'pipeline')}", layouts=(plan.target,))
