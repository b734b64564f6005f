"""The coordinator's state as a person sees it."""

from statistics import median

from bamboo.coordinator import State
from bamboo.events import Status, WorkerState
from bamboo.plan import Cell, WorkerId


def status(state: State, now: float) -> Status:
    """A snapshot for views, metrics and summaries."""
    seconds = median(state.step_seconds[-20:]) if state.step_seconds else None
    steps = state.spec.training.steps
    return Status(
        phase=state.phase,
        epoch=state.plan.epoch if state.plan else 0,
        step=state.step,
        steps=steps,
        loss=state.losses[-1] if state.losses else None,
        losses=state.losses,
        step_seconds=seconds,
        samples_per_second=state.spec.training.global_batch_size / seconds if seconds else None,
        eta_seconds=(steps - state.step) * seconds if seconds else None,
        grid=_grid(state),
        workers=tuple((w, _part(state, w)) for w in state.workers),
        preemptions=state.preemptions,
        notices=state.notices,
        takeovers=state.takeovers,
        unprotected=tuple(f"pipeline {c.pipeline} stage {c.stage}" for c in _unprotected(state)),
        digests=_digests(state),
    )


def _protected(state: State, cell: Cell) -> bool:
    assert state.plan is not None
    return any((cell, w) in state.synced for w in state.plan.at(cell).replicas)


def _unprotected(state: State) -> list[Cell]:
    return [c for c in state.plan.cells() if not _protected(state, c)] if state.plan else []


def _grid(state: State) -> tuple[tuple[tuple[WorkerId, bool], ...], ...]:
    if state.plan is None:
        return ()
    return tuple(
        tuple((a.owner, _protected(state, Cell(d, s))) for s, a in enumerate(row))
        for d, row in enumerate(state.plan.pipelines)
    )


def _part(state: State, worker: WorkerId) -> WorkerState:
    if state.workers[worker].notice_until is not None:
        return WorkerState.LEAVING
    if state.plan is None:
        return WorkerState.STARTING
    if state.plan.owned_by(worker):
        return WorkerState.TRAINING
    return WorkerState.SYNCING if state.plan.replicated_by(worker) else WorkerState.STANDBY


def _digests(state: State) -> tuple[str, ...]:
    return tuple(digest for cell, digest in state.finished if cell.pipeline == 0)
