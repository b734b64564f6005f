"""Filling new workers with copies of stages before a cut, so that few layers move while training stands still.

When a cut for another grid is due, idle workers become replicas of the stages from which they will need most layers,
while training goes on. The cut is requested when these replicas are in step. A job that is short of workers does not
wait for that. See docs/design/resplit.md.
"""

from collections.abc import Mapping, Sequence

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.coordinator.grids import choosing, following
from bamboo_core.coordinator.records.grids import Filling
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.splits import cut
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.planning.plan import Cell, WorkerId
from bamboo_core.planning.splits.resplit_plans import Beginning, filled_before
from bamboo_core.planning.steps.worker_memory import spare_bytes


def watch(turn: Turn) -> None:
    """Choose temporary replicas on idle workers while a cut is due, anew if workers or grid change; else drop them."""
    state = turn.state
    if state.splits.resplit is not None:
        return
    if not _is_due(state, turn.now):
        turn.put(replace(state.splits, filling=None))
        return
    plan = state.current_plan
    staying = frozenset(w for w in state.ready if state.stays(w))
    grid = following.next_grid(state, len(staying))
    known = state.splits.filling
    if known is None or (known.origin, known.grid, known.staying) != (plan.origin, grid, staying):
        decided = _decided(state, turn.now)
        filling = Filling(origin=plan.origin, grid=grid, staying=staying, replicas=decided)
        turn.put(replace(state.splits, filling=filling))


def replicas(state: CoordinatorState) -> Mapping[Cell, tuple[WorkerId, ...]]:
    """Return the temporary replicas of each cell, to keep until the layers are split anew."""
    return state.splits.filling.replicas if state.splits.filling is not None else {}


def _is_due(state: CoordinatorState, now: float) -> bool:
    plan = state.current_plan
    if state.phase != "Running" or plan.sources or len(plan.layouts) > 1:
        return False
    return cut.is_resized(state, now) and cut.known_work(state) is not None and not choosing.is_short(state)


def _decided(state: CoordinatorState, now: float) -> dict[Cell, tuple[WorkerId, ...]]:
    plan, work = state.current_plan, cut.known_work(state)
    rates = choosing.rates_of(state)
    assert work is not None
    staying = [r.peer for w, r in state.ready.items() if state.stays(w)]
    held: dict[WorkerId, set[int]] = {}
    for stage, holders in enumerate(state.certain_holders(plan)):
        for worker in holders:
            held.setdefault(worker, set()).update(range(*plan.stages[stage]))
    sizes = cut.state_bytes(state)
    at_once = Beginning(CheckpointId(step=state.step, id="now"), (), held=held, sizes=sizes)
    onward = cut.plan_from(state, at_once, work, staying, now)
    spare = [peer.worker for peer in staying if not plan.owned_by(peer.worker)]

    kept = _kept_anyway(state, spare)

    def has_room(worker: WorkerId, stages: tuple[int, ...]) -> bool:
        if rates is None or rates.memory is None:
            return True
        together = tuple(sorted(kept[worker] | set(stages)))
        return spare_bytes(rates.figures, state.spec, plan.stages, together) <= rates.memory

    return filled_before(plan, onward, spare, sizes or [1.0] * len(work.costs), has_room)


def _kept_anyway(state: CoordinatorState, spare: Sequence[WorkerId]) -> dict[WorkerId, set[int]]:
    """Return the stages that each spare worker replicates anyway, without temporary replicas."""
    plan, filled = state.current_plan, replicas(state)
    return {w: {c.stage for c in plan.replicated_by(w) if w not in filled.get(c, ())} for w in spare}
