"""The workers that really hold each state, which may differ from what the coordinator knows."""

from collections.abc import Iterable

from bamboo_core.coordinator.coordinator import CoordinatorState
from bamboo_core.planning.plan import WorkerId
from sim_worker import Node


def newest_commit(nodes: Iterable[Node]) -> int:
    """Return the newest step that any worker knows to be committed; -1 for none."""
    return max((n.engine.step - 1 for n in nodes if n.engine), default=-1)


def usable(node: Node, stage: int, commit: int) -> bool:
    """Return whether the job can go on from this worker's state of the stage without repeating a committed step."""
    if not node.alive or node.frozen or node.engine is None or node.engine.components is None:
        return False
    states = node.engine.components.states
    if states.here(stage) is None:
        return False
    return states.version(stage) > commit or (states.version(stage) == commit and states.has_final(stage, commit))


def holders(nodes: Iterable[Node], gone: frozenset[WorkerId], layer: int, commit: int) -> list[WorkerId]:
    """Return the workers not in `gone` that hold usable state of a layer, in a stage or as a copy for another split."""
    return [n.name for n in nodes if n.name not in gone and (_in_stage(n, layer, commit) or _copied(n, layer, commit))]


def _in_stage(node: Node, layer: int, commit: int) -> bool:
    parts = node.engine.components if node.engine else None
    stages = parts.plan.current.stages if parts else ()
    return any(first <= layer < end and usable(node, stage, commit) for stage, (first, end) in enumerate(stages))


def _copied(node: Node, layer: int, commit: int) -> bool:
    if not node.alive or node.frozen or node.engine is None:
        return False
    copies = node.engine.copies
    held = copies.of(copies.cut).get(layer) if copies.cut else None
    return held is not None and held.version > commit


def would_orphan(state: CoordinatorState, victims: set[WorkerId]) -> bool:
    """Return whether losing these workers leaves a cell that nobody can take over, as far as the coordinator knows."""
    plan = state.plan
    if plan is None:
        return False
    gone = victims | state.membership.gone
    cells = [c for c in plan.cells() if c.pipeline < plan.target.pipelines]
    for cell in plan.cells():
        same = [c for c in cells if c.stage == cell.stage]
        heirs = {plan.at(c).owner for c in same} | {plan.at(cell).owner}
        heirs |= {w for w in plan.at(cell).replicas if (cell, w) in state.plans.synced}
        if heirs <= gone:
            return True
    return False
