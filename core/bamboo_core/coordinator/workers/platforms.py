"""Refusal of workers whose platform or data differ from those of the job's other workers."""

from collections.abc import Iterable, Mapping

from bamboo_core.checkpoint.manifest import difference
from bamboo_core.control import protocol
from bamboo_core.control.platform import Platform, conflicts, deciding, most_common
from bamboo_core.coordinator.events import Emit, Outcome, RemoveWorker
from bamboo_core.coordinator.records.workers import WorkerRecord
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.job.spec import whole_workers
from bamboo_core.planning.plan import WorkerId
from bamboo_core.text import count

_NAMED = 3  # workers in a sentence


def refuse_misfits(turn: Turn) -> None:
    """Dismiss workers whose platform conflicts with the platform of the plan's workers.

    When the job begins or is restored, the ready workers' most common platform decides, once `whole_workers` are ready.
    """
    state, holders = turn.state, _holders(turn.state)
    begins = state.phase in ("Pending", "Restoring")
    enough = len(state.ready) >= whole_workers(state.spec)
    if not holders and not (begins and enough):
        return
    platforms = _platforms(state.workers, state)
    like = {w: platforms[w] for w in (sorted(holders) if holders else state.ready)}
    common = most_common(like)
    unlike = _named(w for w, platform in like.items() if platform == common)
    for worker, platform in platforms.items():
        if worker not in holders and (why := conflicts(platform, common)):
            _dismiss(turn, worker, "PlatformMismatch", f"{worker} has {why}, unlike {unlike}")


def _named(workers: Iterable[WorkerId]) -> str:
    names = sorted(workers)
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {count(more, 'other')}" if more > 0 else "")


def _platforms(workers: Mapping[WorkerId, WorkerRecord], state: CoordinatorState) -> dict[WorkerId, Platform]:
    """Return each worker's platform, as far as it affects results in this job."""
    return {w: deciding(r.platform, compiled=state.spec.training.compile) for w, r in workers.items()}


def fitting(state: CoordinatorState) -> set[WorkerId]:
    """Return the ready workers that have the most common platform; a job can begin with them."""
    ready = _platforms(state.ready, state)
    if not ready:
        return set()
    common = most_common(ready)
    return {w for w, platform in ready.items() if not conflicts(platform, common)}


def _holders(state: CoordinatorState) -> set[WorkerId]:
    plan = state.plan if state.phase != "Restoring" else None
    return set(plan.holders() & state.workers.keys()) if plan else set()


def refuse_other_data(turn: Turn, worker: WorkerId, report: protocol.WorkerReady) -> bool:
    """Refuse a worker whose data differ from the first worker's; return whether they differ.

    Before the first plan the job fails, because only the user knows which data are right. Later the job continues
    without the worker, and fails only during a restore, once more than backoffLimit workers in a row are refused.
    """
    state = turn.state
    first, known = state.admission.data or (worker, report)
    other = _other_data(known, report)
    if other is None:
        return False
    text = f"{worker} has data with {other[1]}, and those of {first} have {other[0]}"
    if state.plan is None:
        turn.finish(Outcome.FAILED, "DataMismatch", f"{text}; every worker needs the same")
        return True
    _dismiss(turn, worker, "DataMismatch", text)
    many = turn.state.admission.in_a_row
    if state.phase == "Restoring" and many > state.spec.backoff_limit:
        why = f"{many} new workers in a row had other data than the job; the last one, {text}"
        turn.finish(Outcome.FAILED, "DataMismatch", why)
    return True


def _other_data(known: protocol.WorkerReady, report: protocol.WorkerReady) -> tuple[str, str] | None:
    """Return how the first worker's data and another's differ, as (first, other); None if they match or are unknown."""
    if not report.samples:
        return None
    for first, other, thing in ((known.samples, report.samples, "sample"), (known.steps, report.steps, "step")):
        if first != other:
            return count(first, thing), count(other, thing)
    return difference(known.data, report.data) if known.data and report.data else None


def _dismiss(turn: Turn, worker: WorkerId, reason: str, text: str) -> None:
    """Dismiss a worker without counting a failure. Repeated refusals delay the request for another worker."""
    state = turn.state
    turn.put(
        state.workers.without({worker}),
        state.membership.without(worker),
        state.liveness.without(worker),
        state.layers.not_asked_of(worker),
        replace(state.plans, applied=state.plans.applied - {worker}),
        state.admission.refusing(worker, text, turn.now),
    )
    turn.refuse(worker, reason, text)
    turn.do(Emit(reason, text, True), RemoveWorker(worker))
