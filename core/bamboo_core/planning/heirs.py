"""Who has a stage's state, and who goes on with the stages of workers that are lost at the same time. Pure.

What two adjacent stages had sent to each other is lost with both their owners. So the new owners must not have to
repeat a step of one of them that the other has left behind. A worker applies the steps of all its replicas together, so
one heir of both has both at the same version. Where a plan does not ensure that one worker can be the heir of all, no
step is committed before all replicas can reach the version after it (`heirs_may_differ`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set

from bamboo_core.planning.plan import Assignment, Cell, Plan, WorkerId

Synced = frozenset[tuple[Cell, WorkerId]]  # replicas that are in step


def lost_runs(plan: Plan, lost: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Cells whose owners are lost, with those that are next to each other in a pipeline's ring together."""
    depth = len(plan.stages)
    for d in range(len(plan.pipelines)):
        stages = {c.stage for c in lost if c.pipeline == d}
        starts = [s for s in sorted(stages) if (s - 1) % depth not in stages] or sorted(stages)[:1]
        for start in starts:
            run: list[Cell] = []
            while (start + len(run)) % depth in stages and len(run) < depth:
                run.append(Cell(d, (start + len(run)) % depth))
            yield run


def heirs_of(run: Sequence[Cell], candidates: Callable[[Cell], list[WorkerId]]) -> list[WorkerId | None]:
    """The new owner of each cell: the first candidate of all of them, else each one's own first; None: it has none."""
    named = [candidates(cell) for cell in run]
    common = [w for w in named[0] if all(w in names for names in named)]
    return [common[0] if common else names[0] if names else None for names in named]


def home(owned: list[Cell], stages: int) -> Cell:
    """The cell that a worker keeps: takeovers go to the predecessor, so it is the first of its arc of the ring."""
    first = min(c.pipeline for c in owned)
    mine = {c.stage for c in owned if c.pipeline == first}
    starts = [s for s in sorted(mine) if (s - 1) % stages not in mine]
    return Cell(first, starts[-1] if starts else min(mine))


def heirs_may_differ(plan: Plan) -> bool:
    """Could as many nodes as there are replicas be lost so that adjacent stages of theirs have no common heir?

    With their workers: one each, where nodes have but one.
    """
    domains = domains_of(plan)
    return any(_may_differ(row, domains) for row in plan.pipelines)


def _may_differ(row: Sequence[Assignment], domains: Mapping[WorkerId, str]) -> bool:
    depth = len(row)
    for first in range(depth):
        owners, common, least = {row[first].owner}, set(row[first].replicas), len(row[first].replicas)
        for assignment in (row[(first + more) % depth] for more in range(1, depth)):
            owners.add(assignment.owner)
            common &= set(assignment.replicas)
            least = min(least, len(assignment.replicas))
            lost = {domains[w] for w in owners}
            if len(lost) > least:
                break
            if len(owners) > 1 and len({domains[w] for w in common} - lost) < least - len(lost) + 1:
                return True
    return False


def level_counts(
    plan: Plan, synced: Synced, there: Set[WorkerId], lost_with: Mapping[WorkerId, str]
) -> dict[Cell, int]:
    """For each cell of the plan, how many workers, or nodes, have its state in step: those of its owner, its replicas,
    and other pipelines' owners.

    there: nobody else counts, such as who is lost, or is not heard yet by a restarted coordinator. lost_with: what each
    holder is lost with: itself, or its node. Other pipelines' owners are looked at once for each stage, not for each
    cell: of a thousand workers a hundred may be.
    """
    common = [
        {lost_with[w] for w in owners if w in there}
        for owners in (
            {plan.at(Cell(d, s)).owner for d in range(plan.target.pipelines)} for s in range(len(plan.stages))
        )
    ]
    found = {}
    for cell in plan.cells():
        assignment = plan.at(cell)
        level = (assignment.owner, *(w for w in assignment.replicas if (cell, w) in synced))
        own = {lost_with[w] for w in level if w in there} - common[cell.stage]
        found[cell] = len(common[cell.stage]) + len(own)
    return found


def siblings(plan: Plan, cell: Cell) -> list[WorkerId]:
    """The other pipelines' owners that have the cell's state because they have their own."""
    return [plan.at(Cell(d, cell.stage)).owner for d in range(plan.target.pipelines) if d != cell.pipeline]


def domains_of(plan: Plan) -> dict[WorkerId, str]:
    """What each holder is lost with; see `Peer`."""
    return {w: w for w in plan.holders()} | {peer.worker: peer.failure_domain for peer in plan.workers}
