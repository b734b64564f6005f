"""Pure data parallelism: how a cell whose worker is lost is run by all pipelines' workers together. Pure.

A pipeline of one stage has no boundary tensors, so any worker that holds the stage can run any of its microbatches. The
cell still has one owner, which reduces its gradients with the others'; but its groups of microbatches are divided into
portions, which all owners of the stage run, each beside its own pipeline's. Groups are the unit, because their sums are
what the step's sum is made of (`gradient_groups`): whoever runs them, the bits are the same.

What somebody runs already stays with them, so that nothing of the step in progress is repeated; only what is left
without anybody is given out, to those who run least.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from bamboo_core.planning.plan import Assignment, Cell, Layout, Plan, Portion, WorkerId

Cells = dict[Cell, Assignment]
Range = tuple[int, int]  # microbatches, half-open


def ranges(layout: Layout, pipeline: int, portions: Sequence[Portion]) -> Iterator[tuple[WorkerId, Range]]:
    """Who runs which microbatches of a pipeline: whole groups, in order. Portions without a group are left out."""
    share, units = layout.shares[pipeline], portions[-1].end
    groups = share.end - share.first
    for portion in portions:
        first, end = (share.first + groups * unit // units for unit in (portion.first, portion.end))
        if first < end:
            yield portion.worker, (layout.bounds[first], layout.bounds[end])


def groups_of(layouts: Sequence[Layout], pipeline: int) -> int:
    """How many groups a pipeline runs in a step, under the newest layout that has it."""
    layout = next(layout for layout in reversed(layouts) if pipeline < layout.pipelines)
    share = layout.shares[pipeline]
    return share.end - share.first


def share_out(
    plan: Plan,
    cells: Mapping[Cell, Assignment],
    layouts: Sequence[Layout],
    *,
    leaving: Collection[WorkerId],
    boundary: bool,
) -> Cells:
    """The assignments that follow the plan's, with the portions of cells that are run together.

    These are cells whose owner runs more than its own pipeline, and, for the rest of a step, those that have changed
    hands within it. With several stages, or several devices of a worker, there are none. leaving: workers that are
    given nothing more. boundary: the assignments begin with a step.
    """
    if len(plan.stages) > 1 or plan.device_layers:
        return {c: msgspec.structs.replace(a, portions=()) if a.portions else a for c, a in cells.items()}
    owned = Counter(assignment.owner for assignment in cells.values())
    before, load = {}, Counter[WorkerId]()
    for cell, assignment in cells.items():
        groups = groups_of(layouts, cell.pipeline)
        known = plan.at(cell) if cell.pipeline < len(plan.pipelines) else assignment
        together = owned[assignment.owner] > 1
        if not boundary:
            together = together or known.owner != assignment.owner or bool(known.portions)
        before[cell] = _runners(known, groups) if together else ()
        for portion in before[cell] or (Portion(worker=assignment.owner, first=0, end=groups),):
            load[portion.worker] += portion.end - portion.first
    runners = [w for w in owned if w not in leaving] or list(owned)
    shared = {}
    for cell, assignment in cells.items():
        portions = _given_out(before[cell], assignment.owner, owned, runners, load)
        shared[cell] = msgspec.structs.replace(assignment, portions=portions)
    return shared


def is_settled(plan: Plan) -> bool:
    """Does every worker that has a pipeline of its own run all of it, and no more?"""
    owned = Counter(plan.at(cell).owner for cell in plan.cells())
    return not any(plan.at(cell).portions and owned[plan.at(cell).owner] == 1 for cell in plan.cells())


def _runners(assignment: Assignment, groups: int) -> tuple[Portion, ...]:
    return assignment.portions or (Portion(worker=assignment.owner, first=0, end=groups),)


def _given_out(
    before: Sequence[Portion],
    owner: WorkerId,
    owners: Collection[WorkerId],
    runners: Sequence[WorkerId],
    load: Counter[WorkerId],
) -> tuple[Portion, ...]:
    """These portions, with those that nobody runs any more divided among the runners. load: the microbatches that each
    runs.
    """
    if not before:
        return ()
    found: list[Portion] = []
    in_turn = sorted(runners, key=lambda w: w != owner)
    for portion in before:
        if portion.worker in owners:
            found.append(portion)
            continue
        counts: Counter[WorkerId] = Counter()
        for _ in range(portion.first, portion.end):
            worker = min(in_turn, key=load.__getitem__)
            load[worker] += 1
            counts[worker] += 1
        first = portion.first
        for worker in (w for w in in_turn if counts[w]):
            found.append(Portion(worker=worker, first=first, end=first + counts[worker]))
            first += counts[worker]
    return () if len(found) == 1 and found[0].worker == owner else tuple(found)
