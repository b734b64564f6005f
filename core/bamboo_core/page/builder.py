"""The way from what a job's shell knows to the document of its page. Pure; the time comes in."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypedDict

from bamboo_core.control.memory import BytesByKind
from bamboo_core.coordinator.events import CheckpointSummary, Outcome, Status, WorkerState
from bamboo_core.coordinator.events import Takeover as TakenOver
from bamboo_core.coordinator.protection import OFF, counts_nodes, protection
from bamboo_core.job.spec import JobSpec
from bamboo_core.page import document as d
from bamboo_core.page.history import JobHistory, Point, TimelineMark
from bamboo_core.planning.plan import WorkerId

OVER = "Over"  # the phase of a status
ENDED = "ended"  # ran a stage when the job ended
MOST_SLOW = 3  # workers in a sentence
LOST = "lost"  # runs a stage in the plan, and is not there any more
SENTENCES = {
    "Pending": "Waiting for enough workers to start.",
    "Recovering": "The coordinator was restarted and waits for the workers to come back.",
    "Restoring": "The job goes back to a checkpoint.",
    "Saving": "All steps are done; the workers write the weights.",
    OVER: "The job is over.",
}


def document(
    job: d.PageJob,
    spec: JobSpec,
    status: Status,
    record: JobHistory,
    *,
    now: float,
    ended: d.PageState | None = None,
    cost: d.PageCost | None = None,
) -> d.Document:
    """The page of a job whose coordinator is at hand. ended: how, if it has."""
    names = Labels(spec.name)
    return d.Document(
        now=now,
        job=job,
        state=ended or state(status, spec, names),
        progress=progress(status, spec, ended),
        counts=d.PageCounts(
            preemptions=status.preemptions,
            takeovers=len(status.takeovers),
            notices=status.notices,
            restarts=status.restarts,
        ),
        epoch=status.epoch or None,
        grid=grid(status, names),
        others=others(status, names) if status.phase != OVER else (),
        unprotected=status.unprotected,
        memory=tuple(account(worker, memory, names) for worker, memory in status.memory),
        most_memory=account(*status.most_memory, names) if status.most_memory else None,
        traffic=tuple(account(worker, sent, names) for worker, sent in status.traffic),
        evaluation=evaluation(status, spec),
        checkpoint=checkpoint(status.checkpoint, now) if status.checkpoint else None,
        cost=cost,
        **history_fields(record, names),
    )


class Labels:
    """A worker's name without what all workers of the job share."""

    def __init__(self, job: str) -> None:
        self._prefix = f"{job}-"

    def __call__(self, worker: WorkerId) -> str:
        return worker.removeprefix(self._prefix) or worker


def state(status: Status, spec: JobSpec, names: Labels) -> d.PageState:
    """The job's state in a word and a sentence."""
    if status.phase != "Running":
        tone = "idle" if status.phase in ("Pending", OVER) else "warn"
        return d.PageState(name=status.phase, tone=tone, sentence=SENTENCES.get(status.phase, ""))
    lost = sorted({owner for row in status.grid for owner, _ in row} - {worker for worker, _ in status.workers})
    if lost:
        sentence = f"The work of {', '.join(map(names, lost))} is being taken over."
        return d.PageState(name="Recovering", tone="warn", sentence=sentence)
    found = protection(status, spec)
    if not found.holds and found.reason != OFF:
        return d.PageState(name="Degraded", tone="warn", sentence=f"Training continues; {found.message}.")
    doubled = [w for w, cells in _shares(status).items() if cells > 1]
    if doubled:
        sentence = f"Training continues; {', '.join(map(names, doubled))} does the work of more than one stage."
        return d.PageState(name="Degraded", tone="warn", sentence=sentence)
    if status.differences and status.differences.unresolved:
        sentence = f"Training continues; {status.differences.unresolved}."
        return d.PageState(name="Running", tone="bad", sentence=sentence)
    if status.slow:
        sentence = f"Training continues, held up: {'; '.join(one.told for one in status.slow[:MOST_SLOW])}."
        return d.PageState(name="Running", tone="warn", sentence=sentence)
    if not found.holds:
        return d.PageState(name="Running", tone="good", sentence=f"Training continues, not protected: {found.message}.")
    held = "on at least two nodes" if counts_nodes(spec) else "by at least two workers"
    return d.PageState(name="Running", tone="good", sentence=f"Every stage is held {held}.")


def ended(outcome: Outcome, message: str) -> d.PageState:
    """How a run ended."""
    tones = {Outcome.COMPLETE: "good", Outcome.INTERRUPTED: "idle"}
    return d.PageState(name=outcome.value, tone=tones.get(outcome, "bad"), sentence=message, over=True)


def progress(status: Status, spec: JobSpec, ended: d.PageState | None = None) -> d.PageProgress:
    """What a job that did not complete has trained since its newest checkpoint is not kept."""
    unfinished = ended is not None and ended.over and ended.name != Outcome.COMPLETE
    kept = (status.checkpoint.step or 0) if status.checkpoint else 0
    return d.PageProgress(
        step=status.step,
        steps=status.steps,
        stopped_early=status.stopped_early,
        grid_choice=status.grid_choice,
        done_by=status.date.told if status.date else "",
        loss=finite(status.loss),
        first_loss=finite(status.first_loss),
        gradient_norm=finite(status.gradient_norm),
        learning_rate=finite(status.learning_rate),
        samples=spec.training.global_batch_size,
        samples_per_second=finite(status.samples_per_second),
        step_seconds=finite(status.step_seconds),
        eta_seconds=finite(status.eta_seconds),
        lost_samples=status.lost_samples,
        not_kept=max(0, status.step - kept) if unfinished else 0,
    )


def evaluation(status: Status, spec: JobSpec) -> d.PageEvaluation | None:
    """The newest one, and the best."""
    wanted = spec.training.evaluation
    if wanted is None or not status.evaluations:
        return None
    step, metrics = status.evaluations[-1]
    best = dict(status.evaluations).get(-1 if status.best_evaluation is None else status.best_evaluation)
    return d.PageEvaluation(
        step=step,
        metric=wanted.metric,
        metrics=_finite(metrics),
        best_step=None if best is None else status.best_evaluation,
        best_metrics=None if best is None else _finite(best),
    )


def _finite(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: finite(value) for name, value in metrics.items()}


def grid(status: Status, names: Labels) -> tuple[tuple[d.PageCell, ...], ...]:
    states, shares, slow = dict(status.workers), _shares(status), {one.worker: one.told for one in status.slow}
    return tuple(
        tuple(
            d.PageCell(
                worker=owner,
                label=names(owner),
                state=ENDED if status.phase == OVER else states[owner].value if owner in states else LOST,
                protected=None if status.phase == OVER else protected,
                cells=shares[owner],
                slow=slow.get(owner, ""),
            )
            for owner, protected in row
        )
        for row in status.grid
    )


def _shares(status: Status) -> Counter[WorkerId]:
    return Counter(owner for row in status.grid for owner, _ in row)


def others(status: Status, names: Labels) -> tuple[d.PageWorker, ...]:
    """The workers that run no stage."""
    owners = _shares(status)
    return tuple(
        d.PageWorker(worker=worker, label=names(worker), state=_apart(part))
        for worker, part in status.workers
        if worker not in owners
    )


def _apart(part: WorkerState) -> str:
    """The word for a worker that is in no plan. Nobody runs a stage without a plan, so a training one counts as
    starting.
    """
    return (WorkerState.STARTING if part is WorkerState.TRAINING else part).value


def account(worker: WorkerId, found: BytesByKind, names: Labels) -> d.Account:
    return d.Account(worker=worker, label=names(worker), total=found.total, kinds=found.by_kind())


class HistoryFields(TypedDict):
    """The fields of a document that a record fills."""

    points: tuple[d.Point, ...]
    marks: tuple[d.PageMark, ...]
    events: tuple[d.PageEvent, ...]


def history_fields(record: JobHistory, names: Labels) -> HistoryFields:
    """Marks and events come with the newest first."""
    return {
        "points": tuple(point(p) for p in record.curves.points()),
        "marks": tuple(mark(m, names) for m in reversed(record.marks)),
        "events": tuple(
            d.PageEvent(at=_rounded(at), reason=emit.reason, message=emit.message, warning=emit.warning)
            for at, emit in reversed(record.events)
        ),
    }


def point(point: Point) -> d.Point:
    known = point.figures
    return (
        point.step,
        _rounded(point.at),
        _short(known.loss),
        _short(known.gradient_norm),
        _short(known.learning_rate),
    )


def _short(number: float | None) -> float | None:
    """Six digits, which is more than a curve shows."""
    known = finite(number)
    return None if known is None else float(f"{known:.6g}")


def mark(mark: TimelineMark, names: Labels) -> d.PageMark:
    phases = takeover(mark.takeover, names) if mark.takeover else None
    return d.PageMark(at=_rounded(mark.at), kind=mark.kind.value, message=mark.message, takeover=phases)


def takeover(taken: TakenOver, names: Labels) -> d.TakeoverPhases:
    return d.TakeoverPhases(
        victim=names(taken.victim),
        worker=names(taken.worker),
        pipeline=taken.pipeline,
        stage=taken.stage,
        step=taken.step,
        notice=taken.notice,
        pause=taken.pause_ms,
        decide=taken.decide_ms,
        reform=taken.reform_ms,
        recompute=taken.recompute_ms,
        forwards=taken.forwards,
        backwards=taken.backwards,
        reused=taken.reused,
    )


def finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _rounded(seconds: float) -> float:
    return round(seconds, 3)


def checkpoint(known: CheckpointSummary, now: float) -> d.PageCheckpoint:
    """The checkpoints of a job, for its page. now: the time at which that was said."""
    write = known.writing
    writing = None
    if write is not None:
        since = round(now - write.seconds)
        writing = d.PageCheckpointWrite(step=write.step, written=write.written, layers=write.layers, since=since)
    here = known.age is not None
    return d.PageCheckpoint(
        place=known.place,
        every_steps=known.every_steps,
        step=known.step,
        writing=writing,
        at=round(now - known.age) if known.age is not None else None,
        seconds=known.seconds if here else None,
        bytes=known.bytes if here else None,
        restores=known.restores,
        repeated=known.repeated,
        repeated_seconds=known.repeated_seconds,
    )


def rows(names: Sequence[Sequence[WorkerId]], labels: Labels) -> tuple[tuple[d.PageCell, ...], ...]:
    """A grid of which only the owners are known."""
    shares = Counter(owner for row in names for owner in row)
    return tuple(
        tuple(
            d.PageCell(worker=owner, label=labels(owner), state="unknown", protected=None, cells=shares[owner])
            for owner in row
        )
        for row in names
    )
