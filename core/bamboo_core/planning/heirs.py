"""Heirs: the choice of the workers that take over the stages of lost workers, among the holders of the state. Pure.

The tensors that two adjacent stages have sent to each other are lost if both owners are lost. So one new owner must not
have to repeat a step that the other has already left behind. A worker applies the steps of all its replicas together,
so one heir of both stages has both states at the same version. If losses may leave adjacent stages without a common
heir (`heirs_may_differ`), no step is committed before all replicas can reach the version after it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set

from bamboo_core.planning.plan import Assignment, Cell, Plan, WorkerId

Synced = frozenset[tuple[Cell, WorkerId]]  # replicas that are in sync


def lost_runs(plan: Plan, lost: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Yield the lost cells in runs of adjacent cells of a pipeline's ring. lost: the cells whose owners are lost."""
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
    """Return the new owner of each cell: the first candidate that all cells share, else the cell's own first candidate;
    None for a cell without candidates. candidates: returns a cell's candidates, best first.
    """
    named = [candidates(cell) for cell in run]
    common = [w for w in named[0] if all(w in names for names in named)]
    return [common[0] if common else names[0] if names else None for names in named]


def home(owned: list[Cell], stages: int) -> Cell:
    """Return the cell that a worker keeps when it gives its other cells away. In its first pipeline, this is the first
    cell of the last run of adjacent stages, since workers take over the stages after their own. owned: all its cells.
    """
    first = min(c.pipeline for c in owned)
    mine = {c.stage for c in owned if c.pipeline == first}
    starts = [s for s in sorted(mine) if (s - 1) % stages not in mine]
    return Cell(first, starts[-1] if starts else min(mine))


def heirs_may_differ(plan: Plan) -> bool:
    """Return whether losing as many nodes as there are replicas can leave adjacent lost stages without a common heir.

    A node is lost with all its workers. A worker on an unknown node counts as a node of its own.
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
    plan: Plan, synced: Synced, present: Set[WorkerId], lost_with: Mapping[WorkerId, str]
) -> dict[Cell, int]:
    """Return how many workers or nodes hold each cell's state in sync, including other pipelines' owners of the stage.

    present: the workers that count, without lost workers and workers that have not reconnected to a restarted
    coordinator. lost_with: what to count for each holder: its own name for workers, its failure domain for nodes.
    """
    common = [
        {lost_with[w] for w in owners if w in present}
        for owners in (
            {plan.at(Cell(d, s)).owner for d in range(plan.target.pipelines)} for s in range(len(plan.stages))
        )
    ]
    counts = {}
    for cell in plan.cells():
        assignment = plan.at(cell)
        level = (assignment.owner, *(w for w in assignment.replicas if (cell, w) in synced))
        own = {lost_with[w] for w in level if w in present} - common[cell.stage]
        counts[cell] = len(common[cell.stage]) + len(own)
    return counts


def siblings(plan: Plan, cell: Cell) -> list[WorkerId]:
    """Return the other pipelines' owners of the cell's stage, which hold the same state."""
    return [plan.at(Cell(d, cell.stage)).owner for d in range(plan.target.pipelines) if d != cell.pipeline]


def domains_of(plan: Plan) -> dict[WorkerId, str]:
    """Return the failure domain (see `Peer`) of each worker of the plan; an unlisted holder is its own domain."""
    return {w: w for w in plan.holders()} | {peer.worker: peer.failure_domain for peer in plan.workers}
