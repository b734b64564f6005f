"""Splitting the layers anew over another number of stages, while the job runs.

The root marks a commit after which nobody begins another step (the cut); each worker copies the layers that it holds of
that state to host memory, and says so (StateHeld). When all layers are held by live workers, a plan of a new origin
names who holds what, and each worker begins with the layers that it needs, its own or from others. Until all have
begun, nobody gives up what it holds: whoever is lost on the way, the job goes on from the cut, on whatever grid fits.
See docs/design/resplit.md.
"""

from functools import partial
from typing import Final

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control import protocol
from bamboo_core.coordinator.checkpointing import checkpoints, copies
from bamboo_core.coordinator.events import Emit, Send
from bamboo_core.coordinator.grids import choosing, following, holding
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.splits.by_speed import places
from bamboo_core.coordinator.splits.record import Resplit
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.planning.plan import ROOT, Plan, WorkerId
from bamboo_core.planning.splits.resplit import Beginning, Sources, moved_plan, resplit_plan, sources_of
from bamboo_core.planning.splits.speeds import WorkEstimate

AHEAD_STEPS: Final = 1  # from the last commit to the one that carries a cut at the earliest
AGAIN_SECONDS: Final = 5.0  # after which the root is asked again
COPIES_SECONDS: Final = 60.0  # for which copies of all who hold a stage are waited for, if there is one of each layer


def is_cut(state: CoordinatorState) -> bool:
    """Has a commit carried the wish, so that no further step begins in this split?"""
    cut = state.splits.resplit.cut if state.splits.resplit else None
    return cut is not None and (state.plan is None or state.plan.restore != cut)


def is_moving(state: CoordinatorState) -> bool:
    """Do workers still wait for layers of a cut, so that a loss can only be met by going on from it in another way?"""
    plan = state.plan
    return state.phase == "Running" and plan is not None and bool(plan.sources) and not has_begun(state)


def has_begun(state: CoordinatorState) -> bool:
    """Has everybody begun who has a part, or every owner, as a commit proves? Then losses are met by takeovers."""
    plan = state.plan
    if plan is None or not plan.sources:
        return False
    return state.step > plan.first_step or plan.holders() <= state.plans.applied


def wants(state: CoordinatorState, now: float) -> bool:
    """Have there been workers for another number of stages for a while, or is another split of the layers better, and
    is nothing else going on?
    """
    plan = state.current_plan
    if not is_possible(state) or not (is_resized(state, now) or state.splits.faster) or state.checkpoints.writers:
        return False
    # what is lost with one worker until the cut could not be moved any more
    return all((cell, replica) in state.plans.synced for cell in plan.cells() for replica in plan.at(cell).replicas)


def is_possible(state: CoordinatorState) -> bool:
    """Is nothing else going on that a new split of the layers would disturb, and is it known what layers take?"""
    ending = state.step + 4 >= state.spec.training.steps  # which is to have a checkpoint, too
    busy = ending or state.ending.stopping is not None or len(state.current_plan.layouts) > 1
    return not (busy or _somebody_leaves(state) or known_work(state) is None)


def is_resized(state: CoordinatorState, now: float) -> bool:
    """Have there been workers for a while for another grid that only other states can follow?

    That is another number of stages, or one for which their memory takes another split.
    """
    if state.plan is None or state.grids.resize is None:
        return False
    return following.splits_anew(state) and following.is_due(state, now)


def known_work(state: CoordinatorState) -> WorkEstimate | None:
    """What layers and workers take: as measured, else as counted; None if neither is known."""
    if state.stragglers.estimate is not None:
        return state.stragglers.estimate
    costs = state.grids.costs or state.profile.costs
    return WorkEstimate(costs) if costs else None


def withdraw(turn: Turn) -> None:
    """There is something more urgent than the cut that is asked for, or there are workers for this split again.

    A wish that is never fulfilled takes its place with the root.
    """
    state, resplit = turn.state, turn.state.splits.resplit
    if resplit is None or resplit.cut is not None or state.plan is None:
        return
    wish, root = state.checkpoints.numbered(), state.plan.at(ROOT).owner
    turn.put(wish, replace(state.splits, resplit=None))
    never = state.spec.training.steps + 1
    turn.do(Send(root, protocol.TakeCheckpoint(number=wish.number, at=never, writers=())))


def is_untimely(state: CoordinatorState) -> bool:
    """Should a cut that is asked for not be made now?"""
    balances = state.splits.resplit is not None and state.splits.resplit.stages is not None
    return _somebody_leaves(state) or state.ending.stopping is not None or (state.grids.resize is None and not balances)


def _somebody_leaves(state: CoordinatorState) -> bool:
    """Has a worker notice that still has a part? Who has none waits only until its log is not needed any more."""
    parts = state.current_plan.holders()
    return any(not state.workers[w].released and w in parts for w in state.noticed)


def wish(turn: Turn) -> None:
    """Ask for a cut soon."""
    state, wish = turn.state, turn.state.checkpoints.numbered()
    faster = None if is_resized(state, turn.now) else state.splits.faster
    stages = faster.stages if faster else None
    resplit = Resplit(number=wish.number, at=state.step + AHEAD_STEPS, since=turn.now, stages=stages)
    turn.put(wish, replace(state.splits, resplit=resplit, uneven=None, faster=None))
    if faster:
        turn.do(Emit("Rebalancing", faster.why))
    _ask(turn)


def look_after(turn: Turn) -> None:
    """While no commit has carried the wish: ask the root again, or another one; at the end of the job, forget it."""
    state, resplit = turn.state, turn.state.splits.resplit
    if resplit is None or state.plan is None:
        return
    passed = resplit.cut is not None and state.step > resplit.cut.step
    if state.step >= state.spec.training.steps or passed:
        turn.put(replace(state.splits, resplit=None))
    elif resplit.cut is None:
        if is_untimely(state):
            withdraw(turn)
            return
        root = state.plan.at(ROOT).owner
        if root in state.workers and (resplit.asked != root or turn.now - resplit.asked_at > AGAIN_SECONDS):
            _ask(turn)
    elif is_cut(state) and turn.now - resplit.asked_at > AGAIN_SECONDS:
        _ask(turn)


def begin_anew(turn: Turn) -> None:
    """Begin the step in progress anew on another grid, with the state before it, which all keep until its commit."""
    state = turn.state
    cut = CheckpointId(step=state.step, id=f"anew{state.current_plan.epoch}")
    checkpoints.leave_behind(turn)
    resplit = Resplit(number=0, at=state.step, since=turn.now, stages=None, cut=cut)
    turn.put(replace(state.splits, resplit=resplit, uneven=None, faster=None))
    message = "the step in progress would be done later than on a faster grid: it begins again there"
    turn.do(Emit("Resplitting", message))
    _ask(turn)


def _ask(turn: Turn) -> None:
    """Ask the root for a cut; once there is one, ask workers that have not answered for copies of its state."""
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
    """A commit has carried the wish of that number."""
    resplit = turn.state.splits.resplit
    if resplit is not None and resplit.number == number and resplit.cut is None and not _is_end(turn.state, cut):
        turn.put(replace(turn.state.splits, resplit=replace(resplit, cut=cut, since=turn.now)))


def _is_end(state: CoordinatorState, cut: CheckpointId) -> bool:
    """With the last step the job ends as it is."""
    return cut.step >= state.spec.training.steps


def state_held(turn: Turn, worker: WorkerId, message: protocol.StateHeld) -> None:
    """A worker has copies of these layers of a cut's state; it may be heard of here before the commit is."""
    state, plan, cut = turn.state, turn.state.plan, message.checkpoint
    if _is_end(state, cut):
        return
    if plan is None or any(layer >= plan.stages[-1][1] for layer in message.layers):
        return
    if not plan.sources and (state.workers[worker].origin != plan.origin or cut == plan.restore):
        return  # of a split that is over
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
    """The plan with which the job goes on from the cut; None as long as that cannot be.

    While workers move: another one if one of them is lost.
    """
    plan = turn.state.current_plan
    if plan.sources and plan.worker_ids() <= turn.state.workers.keys():
        return None
    return _switch(turn, plan)


def last_plan(turn: Turn) -> Plan | None:
    """The plan with which nobody has to hold copies any more, once all have begun."""
    state, plan = turn.state, turn.state.plan
    if plan is None or not has_begun(state) or not plan.worker_ids() <= state.workers.keys():
        return None
    resplit = state.splits.resplit
    stopped = turn.now - resplit.since if resplit else None
    evened = (places(state), turn.now) if resplit and resplit.stages else None
    turn.put(replace(state.splits, evened=evened, pause=stopped))
    return moved_plan(plan, tuple(state.live(plan).values()), stopped)


def is_lost(turn: Turn) -> bool:
    """While workers move: is a layer of the cut gone with those that held it?"""
    plan = turn.state.current_plan
    return not plan.worker_ids() <= turn.state.workers.keys() and _sources(turn.state, plan) is None


def _sources(state: CoordinatorState, plan: Plan) -> Sources | None:
    """Who holds each layer of the cut, or of the checkpoint; None if one of the cut's is lost."""
    if plan.sources and not plan.moved:
        live = {w: r.peer for w, r in state.workers.items()}
        return copies.sources(state, plan.restore, len(plan.sources), live)
    live = {w: r.peer for w, r in state.workers.items()}
    return sources_of(_held(state, plan), plan.stages[-1][1], live)


def _held(state: CoordinatorState, plan: Plan) -> dict[WorkerId, set[int]]:
    """The layers that workers say they have of the cut, or that the plan says they have of what it begins with."""
    held = {w: set(layers) for w, layers in state.splits.resplit.held.items()} if state.splits.resplit else {}
    for layer, workers in enumerate(plan.sources):
        for worker in workers:
            held.setdefault(worker, set()).add(layer)
    return held


def _switch(turn: Turn, plan: Plan) -> Plan | None:
    state, resplit = turn.state, turn.state.splits.resplit
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
        return None  # who is cut off comes back soon, or is declared lost
    live = tuple(state.live(plan).values())
    stages = resplit.stages if resplit and not plan.sources else None
    moved = plan.moved or not plan.sources
    beginning = Beginning(cut, sources, moved, stages, _held(state, plan), state_bytes(state))
    grid = following.next_grid(state, len(staying))
    staying = holding.kept(state, staying, grid, turn.now)
    spec = choosing.spec_on(state, grid)
    may_be, instead = partial(following.has_room, state, grid), following.split_of(state, grid)
    return resplit_plan(plan, grid, spec, work, staying, live, beginning, may_be, instead)


def state_bytes(state: CoordinatorState) -> tuple[int, ...]:
    """The bytes of each layer's state, with what the optimizer remembers; empty if that is not known."""
    layers = state.profile.layers
    known = state.profile.costs is not None and len(layers) == len(state.profile.costs)
    return tuple(layer.parameters + layer.optimizer for layer in layers) if known else ()


def _all_hold(state: CoordinatorState, plan: Plan) -> bool:
    """Has everybody who holds a stage for certain a copy of it?"""
    assert state.splits.resplit is not None
    held = state.splits.resplit.held
    return all(
        held.get(worker, frozenset()).issuperset(range(*layers))
        for layers, holders in zip(plan.stages, state.certain_holders(plan), strict=True)
        for worker in holders
        if worker in state.workers
    )
