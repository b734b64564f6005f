"""Splitting the layers anew over another number of stages, while the job runs.

The root marks a commit after which nobody begins another step (the cut); each worker copies the layers that it holds of
that state to host memory, and says so (StateHeld). When all layers are held by live workers, a plan of a new origin
names who holds what, and each worker begins with the layers that it needs, its own or from others. Until all have
begun, nobody gives up what it holds: whoever is lost on the way, the job goes on from the cut, on whatever grid fits.
See docs/design/resplit.md.
"""

from dataclasses import replace
from typing import Final

from bamboo.control import protocol
from bamboo.coordinator.events import Send
from bamboo.coordinator.state import CoordinatorState, Resplit, Turn
from bamboo.planning.plan import ROOT, CheckpointId, Peer, Plan, WorkerId
from bamboo.planning.resplit import moved_plan, resplit_plan, sources_of

AHEAD_STEPS: Final = 2  # before its step a cut is asked for, so that the root knows in time
AGAIN_SECONDS: Final = 5.0  # after which a worker is asked again, and for which copies of replicas are waited for


def is_cut(state: CoordinatorState) -> bool:
    """Has a commit carried the wish, so that no further step begins in this split?"""
    return state.resplit is not None and state.resplit.cut is not None


def is_moving(state: CoordinatorState) -> bool:
    """Do workers begin with layers of a cut, so that nobody has given up what it holds?"""
    return state.plan is not None and bool(state.plan.sources)


def wish(turn: Turn) -> None:
    """Ask for a cut soon."""
    state, number = turn.state, turn.state.checkpoints.number + 1
    turn.set(
        checkpoints=replace(state.checkpoints, number=number),
        resplit=Resplit(number=number, at=state.step + AHEAD_STEPS, since=turn.now),
    )
    _ask_root(turn)


def look_after(turn: Turn) -> None:
    """While no commit has carried the wish: ask the root again, or another one; at the end of the job, forget it."""
    state, resplit = turn.state, turn.state.resplit
    if resplit is None or state.plan is None:
        return
    passed = resplit.cut is not None and state.step > resplit.cut.step
    if state.step >= state.spec.training.steps or passed:
        turn.set(resplit=None)
    elif resplit.cut is None:
        root = state.plan.at(ROOT).owner
        if root in state.workers and (resplit.asked != root or turn.now - resplit.asked_at > AGAIN_SECONDS):
            _ask_root(turn)


def _ask_root(turn: Turn) -> None:
    resplit, plan = turn.state.resplit, turn.state.plan
    assert resplit is not None
    assert plan is not None
    root = plan.at(ROOT).owner
    turn.set(resplit=replace(resplit, asked=root, asked_at=turn.now))
    turn.do(Send(root, protocol.TakeCheckpoint(number=resplit.number, at=resplit.at, writers=(), hold=True)))


def carried(turn: Turn, number: int, cut: CheckpointId) -> None:
    """A commit has carried the wish of that number."""
    resplit = turn.state.resplit
    if resplit is not None and resplit.number == number and resplit.cut is None and not _is_end(turn.state, cut):
        turn.set(resplit=replace(resplit, cut=cut, since=turn.now))


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
    resplit = state.resplit
    if resplit is None or (resplit.cut is not None and resplit.cut != cut):
        resplit = Resplit(number=0, at=cut.step, since=turn.now)
    elif resplit.cut is None:
        resplit = replace(resplit, since=turn.now)
    held = {**resplit.held, worker: resplit.held.get(worker, frozenset()) | frozenset(message.layers)}
    turn.set(resplit=replace(resplit, cut=cut, held=held))


def next_plan(turn: Turn) -> Plan | None:
    """The plan with which the job goes on from the cut; None as long as that cannot be.

    While workers move: another one if one of them is lost, and the last one when all have begun.
    """
    state, plan = turn.state, turn.state.plan
    assert plan is not None
    live = [r.peer for w, r in state.workers.items() if r.ready or w in plan.worker_ids()]
    if plan.sources and plan.worker_ids() <= state.workers.keys():
        since = state.resplit.since if state.resplit else None
        stopped = None if since is None else turn.now - since
        return moved_plan(plan, live, stopped) if plan.worker_ids() <= state.applied else None
    return _switch(turn, plan, live)


def is_lost(turn: Turn) -> bool:
    """While workers move: is a layer of the cut gone with those that held it?"""
    plan = turn.state.plan
    assert plan is not None
    return not plan.worker_ids() <= turn.state.workers.keys() and _sources(turn.state, plan) is None


def _sources(state: CoordinatorState, plan: Plan) -> tuple[tuple[WorkerId, ...], ...] | None:
    resplit = state.resplit
    held = {w: set(layers) for w, layers in resplit.held.items()} if resplit else {}
    for layer, workers in enumerate(plan.sources):
        for worker in workers:
            held.setdefault(worker, set()).add(layer)
    live = {w: r.peer for w, r in state.workers.items()}
    return sources_of(held, plan.stages[-1][1], live)


def _switch(turn: Turn, plan: Plan, live: list[Peer]) -> Plan | None:
    state, resplit = turn.state, turn.state.resplit
    cut = plan.restore if plan.sources else resplit.cut if resplit else None
    sources = _sources(state, plan)
    if cut is None or sources is None or state.costs is None:
        return None
    if not plan.sources and resplit and not _all_hold(state, plan) and turn.now - resplit.since < AGAIN_SECONDS:
        return None
    ready = [r for r in state.ready.values() if r.cut_since is None]
    staying = [r.peer for r in ready if r.notice_until is None] or [r.peer for r in ready]
    if not staying:
        return None
    return resplit_plan(plan, state.spec, state.costs, staying, live, cut, sources)


def _all_hold(state: CoordinatorState, plan: Plan) -> bool:
    """Has everybody who holds a stage for certain a copy of it?"""
    assert state.resplit is not None
    held = state.resplit.held
    for cell in plan.cells():
        layers = range(*plan.stages[cell.stage])
        holders = [plan.at(cell).owner, *(w for w in plan.at(cell).replicas if (cell, w) in state.synced)]
        if any(w in state.workers and not held.get(w, frozenset()).issuperset(layers) for w in holders):
            return False
    return True
