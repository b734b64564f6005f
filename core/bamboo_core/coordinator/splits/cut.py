"""Resplitting: a new split of the layers over stages while the job runs.

The root marks a commit after which no worker begins another step (the cut). Each worker copies its layers of that state
to host memory and reports them (StateHeld). Once all have reported (after a while, once live workers hold all layers),
a plan of a new origin names the holders, and each worker starts with the layers that it needs, its own or received
ones. Until all have started, every worker keeps its copies. So after a loss that leaves a copy of each layer, the job
goes on from the cut. See docs/design/resplit.md.
"""

from functools import partial
from typing import Final

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control import protocol
from bamboo_core.coordinator.checkpointing import copies, saving
from bamboo_core.coordinator.checkpointing.saving import AGAIN_SECONDS
from bamboo_core.coordinator.events import Emit, Send
from bamboo_core.coordinator.grids import choosing, following, holding
from bamboo_core.coordinator.records.grids import Resplit
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.splits.by_speed import places
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.planning.plan import ROOT, Peer, Plan, WorkerId
from bamboo_core.planning.splits.resplit_plans import Beginning, Sources, moved_plan, resplit_plan, sources_of
from bamboo_core.planning.splits.speeds import WorkEstimate

AHEAD_STEPS: Final = 1  # from the last commit to the earliest one that may carry a cut
COPIES_SECONDS: Final = 60.0  # from the cut, for all holders' copies; then one of each layer is enough


def is_cut(state: CoordinatorState) -> bool:
    """Return whether a cut waits for the plan that continues from it; no step begins meanwhile."""
    cut = state.splits.resplit.cut if state.splits.resplit else None
    return cut is not None and (state.plan is None or state.plan.restore != cut)


def is_moving(state: CoordinatorState) -> bool:
    """Return whether workers may still wait for layers of a cut or checkpoint; a loss then needs a new plan from it."""
    plan = state.plan
    return state.phase == "Running" and plan is not None and bool(plan.sources) and not has_begun(state)


def has_begun(state: CoordinatorState) -> bool:
    """Return whether the job has started from the cut or checkpoint whose copies `plan.sources` names: all holders
    have applied the plan, or a step was committed. Takeovers then handle losses. False if it is empty.
    """
    plan = state.plan
    if plan is None or not plan.sources:
        return False
    return state.step > plan.first_step or plan.holders() <= state.plans.applied


def wants(state: CoordinatorState, now: float) -> bool:
    """Return whether to request a cut: a new grid or split is due, nothing else goes on, and replicas are in step."""
    plan = state.current_plan
    if not is_possible(state) or not (is_resized(state, now) or state.splits.faster) or state.checkpoints.writers:
        return False
    # a loss before the cut could take the only copy of a stage
    return all((cell, replica) in state.plans.synced for cell in plan.cells() for replica in plan.at(cell).replicas)


def is_possible(state: CoordinatorState) -> bool:
    """Return whether a cut is possible: no end is near, no holder leaves, only one layout is left, costs are known."""
    ending = state.step + 4 >= state.spec.training.steps  # the last step also needs a checkpoint
    busy = ending or state.ending.stopping is not None or len(state.current_plan.layouts) > 1
    return not (busy or _somebody_leaves(state) or known_work(state) is None)


def is_resized(state: CoordinatorState, now: float) -> bool:
    """Return whether a change to a grid that needs a new split is due (`following.is_due`).

    Such a grid has another number of stages, needs another split to fit in memory, or gives back expensive workers.
    """
    if state.plan is None or state.grids.resize is None:
        return False
    return following.splits_anew(state) and following.is_due(state, now)


def known_work(state: CoordinatorState) -> WorkEstimate | None:
    """Return the layers' costs, measured or else counted, and measured speeds of workers; None if costs are unknown."""
    if state.stragglers.estimate is not None:
        return state.stragglers.estimate
    costs = state.grids.costs or state.layers.costs
    return WorkEstimate(costs) if costs else None


def withdraw(turn: Turn) -> None:
    """Withdraw a requested cut, unless it is known that a commit has carried it. Do nothing without a request.

    The root gets a request for a step that never comes, which replaces the withdrawn one.
    """
    state, resplit = turn.state, turn.state.splits.resplit
    if resplit is None or resplit.cut is not None or state.plan is None:
        return
    numbered, root = state.checkpoints.numbered(), state.plan.at(ROOT).owner
    turn.put(numbered, replace(state.splits, resplit=None))
    never = state.spec.training.steps + 1
    turn.do(Send(root, protocol.TakeCheckpoint(number=numbered.number, at=never, writers=())))


def _somebody_leaves(state: CoordinatorState) -> bool:
    """Return whether a worker under notice still holds a stage and has not been asked to leave."""
    parts = state.current_plan.holders()
    return any(not state.workers[w].released and w in parts for w in state.noticed)


def request(turn: Turn) -> None:
    """Request a cut at the next commit or a later one: for another grid, else for a faster split, which is reported."""
    state, numbered = turn.state, turn.state.checkpoints.numbered()
    faster = None if is_resized(state, turn.now) else state.splits.faster
    stages = faster.stages if faster else None
    resplit = Resplit(number=numbered.number, at=state.step + AHEAD_STEPS, since=turn.now, stages=stages)
    turn.put(numbered, replace(state.splits, resplit=resplit, uneven=None, faster=None))
    if faster:
        turn.do(Emit("Rebalancing", faster.why))
    _ask(turn)


def look_after(turn: Turn) -> None:
    """Repeat a cut's unanswered requests; withdraw a cut that is not wanted any more, and drop one that is over."""
    state, resplit = turn.state, turn.state.splits.resplit
    if resplit is None or state.plan is None:
        return
    passed = resplit.cut is not None and state.step > resplit.cut.step
    if state.step >= state.spec.training.steps or passed:
        turn.put(replace(state.splits, resplit=None))
    elif resplit.cut is None:
        unwanted = state.grids.resize is None and resplit.stages is None
        if _somebody_leaves(state) or state.ending.stopping is not None or unwanted:
            withdraw(turn)
            return
        root = state.plan.at(ROOT).owner
        if root in state.workers and (resplit.asked != root or turn.now - resplit.asked_at > AGAIN_SECONDS):
            _ask(turn)
    elif is_cut(state) and turn.now - resplit.asked_at > AGAIN_SECONDS:
        _ask(turn)


def begin_anew(turn: Turn) -> None:
    """Make the state before the step in progress a cut, so that the step begins anew on another grid.

    Workers keep that state until the step's commit. Abandon a checkpoint in progress, or withdraw its request.
    """
    state = turn.state
    cut = CheckpointId(step=state.step, id=f"anew{state.current_plan.epoch}")
    saving.leave_behind(turn)
    resplit = Resplit(number=0, at=state.step, since=turn.now, stages=None, cut=cut)
    turn.put(replace(state.splits, resplit=resplit, uneven=None, faster=None))
    message = "the step in progress would be done later than on a faster grid: it begins again there"
    turn.do(Emit("Resplitting", message))
    _ask(turn)


def _ask(turn: Turn) -> None:
    """Ask the root for a cut; once one is known, ask the plan's workers without an answer for copies of its state."""
    resplit, plan = turn.state.splits.resplit, turn.state.current_plan
    assert resplit is not None
    root = plan.at(ROOT).owner
    turn.put(replace(turn.state.splits, resplit=replace(resplit, asked=root, asked_at=turn.now)))
    if resplit.cut is None:
        turn.do(Send(root, protocol.TakeCheckpoint(number=resplit.number, at=resplit.at, writers=(), hold=True)))
    else:
        missing = sorted(plan.worker_ids() & turn.state.workers.keys() - resplit.held.keys())
        turn.do(*(Send(worker, protocol.HoldState(checkpoint=resplit.cut)) for worker in missing))


def carried(turn: Turn, number: int, cut: CheckpointId) -> None:
    """Record that a commit has carried the cut request with that number, if it is open and the job has steps left."""
    resplit = turn.state.splits.resplit
    if resplit is not None and resplit.number == number and resplit.cut is None and not _is_end(turn.state, cut):
        turn.put(replace(turn.state.splits, resplit=replace(resplit, cut=cut, since=turn.now)))


def _is_end(state: CoordinatorState, cut: CheckpointId) -> bool:
    """Return whether the cut falls on the job's last step; the job then ends with its present split."""
    return cut.step >= state.spec.training.steps


def state_held(turn: Turn, worker: WorkerId, message: protocol.StateHeld) -> None:
    """Record a worker's copies of a cut's layers, unless the cut is over. The report of its commit may come later."""
    state, plan, cut = turn.state, turn.state.plan, message.checkpoint
    if _is_end(state, cut):
        return
    if plan is None or any(layer >= plan.stages[-1][1] for layer in message.layers):
        return
    if not plan.sources and (state.workers[worker].origin != plan.origin or cut == plan.restore):
        return  # copies of an earlier split
    if plan.sources and cut != plan.restore:
        return
    known = state.splits.resplit
    if known is None or (known.cut is not None and known.cut != cut):
        known = Resplit(number=0, at=cut.step, since=turn.now)
    elif known.cut is None:
        known = replace(known, since=turn.now)
    held = {**known.held, worker: known.held.get(worker, frozenset()) | frozenset(message.layers)}
    turn.put(replace(state.splits, resplit=replace(known, cut=cut, held=held)))


def next_plan(turn: Turn) -> Plan | None:
    """Return the plan with which the job goes on from the cut or checkpoint, or None until one is possible.

    While layers move, only the loss of a worker leads to another plan.
    """
    state, plan, resplit = turn.state, turn.state.current_plan, turn.state.splits.resplit
    if plan.sources and not state.lost(plan):
        return None
    cut = plan.restore if plan.sources else resplit.cut if resplit else None
    early = not plan.sources and resplit is not None and turn.now - resplit.since < COPIES_SECONDS
    if cut is None or (early and not _all_hold(state, plan)):
        return None
    sources, work = _sources(state, plan), known_work(state)
    if sources is None or work is None:
        return None
    ready = list(state.ready.values())
    staying = [r.peer for w, r in state.ready.items() if state.stays(w)] or [r.peer for r in ready]
    if not staying or any(r.cut_since is not None for r in ready):
        return None  # a worker that is cut off returns soon or is declared lost
    stages = resplit.stages if resplit and not plan.sources else None
    moved = plan.moved or not plan.sources
    beginning = Beginning(cut, sources, moved, stages, _held(state, plan), state_bytes(state))
    return plan_from(state, beginning, work, staying, turn.now)


def last_plan(turn: Turn) -> Plan | None:
    """Return the plan with which workers drop their copies, once the job has started (`has_begun`); else None.

    Also record how long the cut stopped training, if known, and whether it was for speed. None while a worker is lost.
    """
    state, plan = turn.state, turn.state.plan
    if plan is None or not has_begun(state) or state.lost(plan):
        return None
    resplit = state.splits.resplit
    stopped = turn.now - resplit.since if resplit else None
    evened = (places(state), turn.now) if resplit and resplit.stages else None
    turn.put(replace(state.splits, evened=evened, pause=stopped))
    return moved_plan(plan, tuple(state.live(plan).values()), stopped)


def is_lost(turn: Turn) -> bool:
    """Return whether a layer of the cut was lost with its holders while layers move."""
    plan = turn.state.current_plan
    return bool(turn.state.lost(plan)) and _sources(turn.state, plan) is None


def _sources(state: CoordinatorState, plan: Plan) -> Sources | None:
    """Return each layer's live holders for the cut or checkpoint; None if a layer of a cut has no known live holder."""
    live = {w: r.peer for w, r in state.workers.items()}
    if plan.sources and not plan.moved:
        return copies.sources(state, plan.restore, len(plan.sources), live)
    return sources_of(_held(state, plan), plan.stages[-1][1], live)


def _held(state: CoordinatorState, plan: Plan) -> dict[WorkerId, set[int]]:
    """Return the layers that each worker has reported for the cut, or that it holds by `plan.sources`."""
    held = {w: set(layers) for w, layers in state.splits.resplit.held.items()} if state.splits.resplit else {}
    for layer, workers in enumerate(plan.sources):
        for worker in workers:
            held.setdefault(worker, set()).add(layer)
    return held


def plan_from(
    state: CoordinatorState, beginning: Beginning, work: WorkEstimate, staying: list[Peer], now: float
) -> Plan:
    """Return the plan that continues from the state in `beginning`, on the grid for the staying workers."""
    plan, grid = state.current_plan, following.next_grid(state, len(staying))
    kept, live = holding.kept(state, staying, grid, now), tuple(state.live(plan).values())
    spec, may_be = choosing.spec_on(state, grid), partial(following.has_room, state, grid)
    return resplit_plan(plan, grid, spec, work, kept, live, beginning, may_be, following.split_of(state, grid))


def state_bytes(state: CoordinatorState) -> tuple[int, ...]:
    """Return the bytes of each layer's state (parameters and optimizer); empty if unknown."""
    layers = state.layers.sizes
    known = state.layers.costs is not None and len(layers) == len(state.layers.costs)
    return tuple(layer.parameters + layer.optimizer for layer in layers) if known else ()


def _all_hold(state: CoordinatorState, plan: Plan) -> bool:
    """Return whether every present worker that certainly holds a stage has reported copies of the stage's layers."""
    assert state.splits.resplit is not None
    held = state.splits.resplit.held
    return all(
        held.get(worker, frozenset()).issuperset(range(*layers))
        for layers, holders in zip(plan.stages, state.certain_holders(plan), strict=True)
        for worker in holders
        if worker in state.workers
    )
