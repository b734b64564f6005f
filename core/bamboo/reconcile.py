"""From the plan in force to the next one: takeover, drain, re-protection, healing, and the return to the target.

Level-triggered: every function looks only at what is, and proposes at most one next plan. Ownership moves only to a
worker that already holds an in-sync replica of the stage, so that any proposal can be obeyed in the middle of a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from bamboo.grid import shadow_of
from bamboo.plan import Assignment, Cell, Peer, Plan, WorkerId

Synced = frozenset[tuple[Cell, WorkerId]]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a reconciliation looks at. live: in order of joining; leaving: those that have a notice."""

    plan: Plan
    live: Mapping[WorkerId, Peer]
    leaving: frozenset[WorkerId]
    synced: Synced
    redundant: bool


@dataclass(frozen=True, slots=True)
class StageLost:
    """No worker holds these cells' state any more."""

    cells: tuple[Cell, ...]


Cells = dict[Cell, Assignment]


def takeover(view: View) -> Plan | StageLost | None:
    """Move every cell of a lost worker to a holder of its stage, at once."""
    plan = view.plan
    lost = {w for c in plan.cells() for w in plan.at(c).holders if w not in view.live}
    if not lost and plan.worker_ids() <= view.live.keys():
        return None
    cells: Cells = {}
    moved, gone = [], []
    for cell in plan.cells():
        assignment = plan.at(cell)
        replicas = tuple(w for w in assignment.replicas if w in view.live)
        if assignment.owner in view.live:
            cells[cell] = Assignment(owner=assignment.owner, replicas=replicas)
            continue
        heir = _heir(view, cell)
        if heir is None:
            gone.append(cell)
            continue
        moved.append((cell, heir))
        cells[cell] = Assignment(owner=heir, replicas=tuple(w for w in replicas if w != heir))
    if gone:
        return StageLost(tuple(gone))
    story = ", ".join(f"{heir} takes stage {c.stage} of pipeline {c.pipeline} over" for c, heir in moved)
    message = f"lost {', '.join(sorted(lost)) or 'a worker without a part'}; {story or 'no cell had to move'}"
    return _next(view, cells, "Takeover" if moved else "WorkerRemoved", message)


def _heir(view: View, cell: Cell) -> WorkerId | None:
    """An in-sync replica, staying ones first; else the owner of the same stage in another pipeline."""
    plan = view.plan
    replicas = [w for w in plan.at(cell).replicas if w in view.live and (cell, w) in view.synced]
    for worker in sorted(replicas, key=lambda w: w in view.leaving):
        return worker
    siblings = [plan.at(Cell(d, cell.stage)).owner for d in range(plan.target.pipelines) if d != cell.pipeline]
    return next((w for w in siblings if w in view.live), None)


def improve(view: View) -> Plan | None:
    """One step towards the target: replicas where they are missing, owners where they belong, nothing superfluous."""
    plan, target = view.plan, _target(view)
    wanted: Cells = {}
    for cell in plan.cells():
        owner, shadow = target[cell]
        missing = [w for w in (owner, shadow) if w and w not in plan.at(cell).holders]
        wanted[cell] = Assignment(owner=plan.at(cell).owner, replicas=(*plan.at(cell).replicas, *missing))
    if any(wanted[c] != plan.at(c) for c in plan.cells()):
        names = sorted({w for c in plan.cells() for w in wanted[c].replicas if w not in plan.at(c).replicas})
        return _next(view, wanted, "Replicating", f"{', '.join(names)} receive(s) replicas while training goes on")
    moves = {
        cell: target[cell][0]
        for cell in plan.cells()
        if target[cell][0] != plan.at(cell).owner and (cell, target[cell][0]) in view.synced
    }
    if moves:
        return _move(view, moves)
    return _trim(view, target)


def _target(view: View) -> dict[Cell, tuple[WorkerId, WorkerId | None]]:
    """The owner and the shadow that each cell should have, given who is there."""
    plan = view.plan
    busy = {w for c in plan.cells() for w in plan.at(c).holders}
    owners_now = {plan.at(c).owner for c in plan.cells()}
    spare = [w for w in view.live if w not in owners_now and w not in view.leaving]
    spare.sort(key=lambda w: w not in busy)  # those that are being prepared already, first
    owners = {c: plan.at(c).owner for c in plan.cells()}
    for cell in _to_move(view):
        healer = next((w for w in spare if w in plan.at(cell).replicas), None) or next(
            (w for w in spare if not _prepared_elsewhere(plan, w, cell)), None
        )
        if healer:
            spare.remove(healer)
            owners[cell] = healer
        elif owners[cell] in view.leaving:
            owners[cell] = _stand_in(view, cell) or owners[cell]
    target = {}
    for cell in plan.cells():
        row = [owners[Cell(cell.pipeline, s)] for s in range(len(plan.stages))]
        staying = [w if w not in view.leaving else row[cell.stage] for w in row]
        shadow = shadow_of(staying, cell.stage) if view.redundant else None
        if shadow is None and view.redundant and plan.target.pipelines == 1:
            shadow = next((w for w in plan.at(cell).replicas if w in spare), None) or next(iter(spare), None)
        target[cell] = (owners[cell], shadow)
    return target


def _prepared_elsewhere(plan: Plan, worker: WorkerId, cell: Cell) -> bool:
    return any(worker in plan.at(c).holders for c in plan.cells() if c != cell)


def _stand_in(view: View, cell: Cell) -> WorkerId | None:
    """Who should own a leaving worker's cell when nobody is spare: its shadow, else the nearest staying neighbour."""
    plan = view.plan
    for worker in plan.at(cell).replicas:
        if worker not in view.leaving and (cell, worker) in view.synced:
            return worker
    row = [plan.at(Cell(cell.pipeline, s)).owner for s in range(len(plan.stages))]
    for back in range(1, len(row)):
        candidate = row[(cell.stage - back) % len(row)]
        if candidate not in view.leaving:
            return candidate
    return None


def _to_move(view: View) -> list[Cell]:
    """Cells that should find another owner: a leaving worker's, and all but one of a doubled worker's."""
    plan = view.plan
    cells: list[Cell] = []
    for worker in dict.fromkeys(plan.at(c).owner for c in plan.cells()):
        owned = plan.owned_by(worker)
        cells += owned if worker in view.leaving else [c for c in owned if c != _home(owned, len(plan.stages))]
    return cells


def _home(owned: list[Cell], stages: int) -> Cell:
    """The cell that a worker keeps: takeovers go to the predecessor, so it is the first of its arc of the ring."""
    first = min(c.pipeline for c in owned)
    mine = {c.stage for c in owned if c.pipeline == first}
    starts = [s for s in sorted(mine) if (s - 1) % stages not in mine]
    return Cell(first, starts[-1] if starts else min(mine))


def drain(view: View) -> Plan | None:
    """A leaving worker hands its cells to in-sync replicas at the next step boundary."""
    plan = view.plan
    moves = {}
    for cell in plan.cells():
        if plan.at(cell).owner in view.leaving:
            staying = [w for w in plan.at(cell).replicas if w not in view.leaving and (cell, w) in view.synced]
            if staying:
                moves[cell] = staying[0]
    return _move(view, moves) if moves else None


def _move(view: View, moves: Mapping[Cell, WorkerId]) -> Plan:
    plan = view.plan
    cells: Cells = {}
    for cell in plan.cells():
        assignment = plan.at(cell)
        if cell in moves:
            rest = tuple(w for w in assignment.replicas if w != moves[cell])
            cells[cell] = Assignment(owner=moves[cell], replicas=(assignment.owner, *rest))
        else:
            cells[cell] = assignment
    leaving = any(plan.at(c).owner in view.leaving for c in moves)
    story = ", ".join(f"{w} takes stage {c.stage} of pipeline {c.pipeline}" for c, w in moves.items())
    return _next(view, cells, "PlannedTakeover" if leaving else "Healed", f"{story} at the next step", boundary=True)


def _trim(view: View, target: Mapping[Cell, tuple[WorkerId, WorkerId | None]]) -> Plan | None:
    """Drop replicas that are not wanted, once those that are wanted are in sync."""
    plan = view.plan
    cells: Cells = {}
    for cell in plan.cells():
        owner, shadow = target[cell]
        assignment = plan.at(cell)
        settled = assignment.owner == owner and (shadow is None or (cell, shadow) in view.synced)
        kept = tuple(w for w in assignment.replicas if w == shadow) if settled else assignment.replicas
        cells[cell] = Assignment(owner=assignment.owner, replicas=kept)
    if all(cells[c] == plan.at(c) for c in plan.cells()):
        return None
    return _next(view, cells, "Settled", "replicas that are not needed any more are dropped")


def _next(view: View, cells: Cells, reason: str, message: str, boundary: bool = False) -> Plan:
    plan = view.plan
    rows = tuple(tuple(cells[Cell(d, s)] for s in range(len(plan.stages))) for d in range(len(plan.pipelines)))
    return msgspec.structs.replace(
        plan,
        epoch=plan.epoch + 1,
        pipelines=rows,
        workers=tuple(view.live.values()),
        boundary=boundary,
        reason=reason,
        message=message,
    )
