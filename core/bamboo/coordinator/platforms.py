"""Which workers are refused because they would give other bits than the job's other workers, or not understand them."""

from bamboo.control.platform import Platform, conflicts, most_common
from bamboo.coordinator.events import Emit, RemoveWorker
from bamboo.coordinator.state import CoordinatorState, Turn
from bamboo.planning.plan import Plan, WorkerId

REASON = "PlatformMismatch"
_HOW_TO_ALLOW = "; spec.worker.allowMixedPlatforms: true allows it"


def refuse_misfits(turn: Turn) -> None:
    """Let those go that do not fit to the workers that train, or, when the job begins, to most of the workers.

    Who holds a stage already stays, whatever the spec says by now. When the job begins nobody is refused as long as
    there are too few workers for its grid.
    """
    state, holders = turn.state, _holders(turn.state)
    judged = {w: r.platform for w, r in state.workers.items() if w not in holders}
    begins = state.phase in ("Pending", "Restoring")
    if holders:
        common = most_common({w: state.workers[w].platform for w in sorted(holders)})
    elif begins and len(state.ready) >= state.spec.topology.stages * state.spec.topology.pipelines:
        common = most_common({w: r.platform for w, r in state.ready.items()})
    else:
        return
    mixed = state.spec.worker.allow_mixed_platforms
    for worker, platform in judged.items():
        if why := conflicts(platform, common, mixed=mixed):
            _dismiss(turn, worker, why + ("" if conflicts(platform, common, mixed=True) else _HOW_TO_ALLOW))


def fitting(state: CoordinatorState) -> set[WorkerId]:
    """The workers with which a job can begin: those that fit to what most of them are."""
    ready = {w: r.platform for w, r in state.ready.items()}
    if not ready:
        return set()
    common, mixed = most_common(ready), state.spec.worker.allow_mixed_platforms
    return {w for w, platform in ready.items() if not conflicts(platform, common, mixed=mixed)}


def is_mixed(plan: Plan, state: CoordinatorState) -> bool:
    """Have workers held its states that give different bits?"""
    platforms: set[Platform] = {state.workers[w].platform for w in plan.holders() & state.workers.keys()}
    return plan.mixed or len(platforms) > 1


def _holders(state: CoordinatorState) -> set[WorkerId]:
    plan = state.plan if state.phase != "Restoring" else None
    return plan.holders() & state.workers.keys() if plan else set()


def _dismiss(turn: Turn, worker: WorkerId, why: str) -> None:
    """Not as a failure: there is nothing wrong with it but that it is here. Another one is asked for."""
    state, text = turn.state, f"{worker} has {why}"
    turn.set(
        workers={w: r for w, r in state.workers.items() if w != worker},
        gone=state.gone | {worker},
        links={pair: since for pair, since in state.links.items() if worker not in pair},
        applied=state.applied - {worker},
        profiling=None if state.profiling == worker else state.profiling,
        misfit=(worker, text),
    )
    turn.refuse(worker, REASON, text)
    turn.do(Emit(REASON, text, True), RemoveWorker(worker))
