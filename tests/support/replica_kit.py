"""Plans, and the views of a coordinator's state from which it makes new plans."""

from collections.abc import Collection
from typing import Any

import msgspec

from bamboo_core.job.spec import RedundancySpec
from bamboo_core.job.training_spec import TrainingSpec
from bamboo_core.planning.desired import PlanningView
from bamboo_core.planning.grid import initial_plan
from bamboo_core.planning.heirs import Synced, lost_runs
from bamboo_core.planning.plan import Assignment, Cell, Peer, Plan, WorkerId
from bamboo_core.planning.transitions import takeover

TRAINING = TrainingSpec(steps=1, global_batch_size=8, micro_batch_size=1)


def planned(stages: int, pipelines: int, replicas: int, zones: str) -> Plan:
    """Return a job's first plan, with one layer per stage. zones: letters, each a zone; workers take them in turn."""
    peers = [Peer(worker=f"w{i}", host="h", port=1, zone=zones[i % len(zones)]) for i in range(stages * pipelines)]
    layers = tuple((s, s + 1) for s in range(stages))
    return initial_plan(peers, layers, pipelines, TRAINING, RedundancySpec(replicas=replicas))


def in_two_parts() -> Plan:
    """Return a plan in which w0 owns and w1 replicates two stages (one stage's parts, if workers have two devices)."""
    return msgspec.structs.replace(
        planned(1, 1, 1, "a"),
        stages=((0, 1), (1, 3)),
        pipelines=((Assignment(owner="w0", replicas=("w1",)),) * 2,),
        workers=tuple(Peer(worker=f"w{i}", host="h", port=1) for i in range(2)),
    )


def view(plan: Plan, *, dead: Collection[str] = (), more: int = 0, synced: bool = True, **given: Any) -> PlanningView:
    """Return a coordinator's view of the plan in force.

    dead: lost workers. more: number of spare workers (n0, ...). synced: all replicas are in step. given: other fields.
    """
    live = {p.worker: p for p in plan.workers if p.worker not in dead}
    live |= {f"n{i}": peer(f"n{i}") for i in range(more)}
    usual: dict[str, Any] = {
        "live": live,
        "leaving": {},
        "synced": frozenset((c, w) for c in plan.cells() for w in plan.at(c).replicas) if synced else frozenset(),
        "redundancy": RedundancySpec().on(1),
        "pipelines": len(plan.pipelines),
        "generation": plan.target.generation,
    }
    return PlanningView(plan=plan, **(usual | given))


def after_loss(plan: Plan, dead: set[str]) -> Any:
    """Return the result of `takeover` (plan, StageLost or None) after these losses, with all replicas in sync."""
    return takeover(view(plan, dead=dead, redundancy=RedundancySpec(replicas=3).on(1)))


def adjacent_heirs_differ(plan: Plan, after: Plan) -> bool:
    """Return whether any adjacent stages of a pipeline that were lost at once have different new owners."""
    lost = [c for c in plan.cells() if after.at(c).owner != plan.at(c).owner]
    return any(len({after.at(c).owner for c in run}) > 1 for run in lost_runs(plan, lost))


def peer(name: str, zone: str = "") -> Peer:
    return Peer(worker=name, host="h", port=1, zone=zone)


def training(microbatches: int) -> TrainingSpec:
    return TrainingSpec(steps=1, global_batch_size=microbatches, micro_batch_size=1)


def level_holders(plan: Plan, synced: Synced, cell: Cell) -> set[WorkerId]:
    """Return the workers with the cell's newest state: its replicas in sync and the stage's owners in all pipelines."""
    others = (plan.at(Cell(d, cell.stage)).owner for d in range(plan.target.pipelines))
    replicas = (w for w in plan.at(cell).replicas if (cell, w) in synced)
    return {plan.at(cell).owner, *others, *replicas}


def copies(plan: Plan, synced: Synced, cell: Cell) -> int:
    """Return how many workers the job may lose at once without losing the cell's state."""
    return len(level_holders(plan, synced, cell)) - 1
