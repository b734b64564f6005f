"""The way from what a job's shell knows to the document of its page. Pure; the time comes in."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TypedDict

from msgspec.structs import replace

from bamboo_core.control.memory import Traffic
from bamboo_core.coordinator.events import CheckpointSummary, Outcome, Status, WorkerState
from bamboo_core.coordinator.events import Takeover as TakenOver
from bamboo_core.coordinator.protection import OFF, counts_nodes, protection
from bamboo_core.job.budget_reach import date_told
from bamboo_core.job.spec import USUAL_STEPS, JobSpec
from bamboo_core.job.status import BambooJobStatus, TrainingProgress
from bamboo_core.page import document as d
from bamboo_core.page.history import JobHistory, Point, TimelineMark
from bamboo_core.planning.plan import WorkerId
from bamboo_core.view.job_view import JobView

OVER = "Over"  # the phase of a status
ENDED = "ended"  # ran a stage when the job ended
MOST_SLOW = 3  # workers in a sentence
LOST = "lost"  # runs a stage in the plan, and is not there any more
LATE_SECONDS = 2.0  # a start so much before the record is not the one that the record saw
TONES = {"Running": "good", "Complete": "good", "Failed": "bad", "Invalid": "bad", "Degraded": "warn"}
CONDITIONS = {
    "Invalid": "Accepted",
    "Saving": "Running",
    "Pending": "WorkersReady",
}  # that explain a state, else its own
RESTARTED = (
    "The operator has been restarted since the job began: curves, timeline and events from before are not known here;"
    " the counts are from the BambooJob's status."
)
NOT_SEEN = (
    "The job was not run by this operator process: curves, timeline, memory and events are not known here; the rest is"
    " from the BambooJob's status."
)
OWNERS_ONLY = "Who runs which stage is as the status has it; what the workers are doing is not known at the moment."
SENTENCES = {
    "Pending": "Waiting for enough workers to start.",
    "Recovering": "The coordinator was restarted and waits for the workers to come back.",
    "Restoring": "The job goes back to a checkpoint.",
    "Saving": "All steps are done; the workers write the weights.",
    OVER: "The job is over.",
}


def document(
    view: JobView,
    record: JobHistory | None,
    *,
    place: str,
    began: float | None,
    now: float,
    ended: d.PageState | None = None,
    cost: d.PageCost | None = None,
) -> d.Document:
    """The page of a job. record: None if its shell has not seen it run. began: when the job did. ended: how, if its
    shell knows it.

    What a coordinator says counts first; its status outlasts coordinators, and adds up what they count.
    """
    written, names = view.status, Labels(view.name)
    since = record.since if record else None
    mode = (view.live and view.live.mode) or view.spec.redundancy.mode
    job = d.PageJob(name=view.name, namespace=view.namespace, place=place, mode=mode.value, began=began, since=since)
    shown = ended or state_now(view, names)
    if view.live is not None and record is not None:
        found = _from_coordinator(view, view.live, record, job, shown, now)
    else:
        found = _from_status(view, record, job, shown, now)
    unknown = list(found.unknown)
    if record is None and written.training != TrainingProgress():
        unknown.append(NOT_SEEN)
    elif began is not None and since is not None and began < since - LATE_SECONDS:
        unknown.append(RESTARTED)
    return replace(
        found,
        counts=_counts(written, found.counts),
        evaluation=found.evaluation or _evaluation_in_status(view),
        checkpoint=_checkpoint_in_status(view, found.checkpoint),
        cost=cost,
        conditions=conditions(written),
        unknown=tuple(unknown),
    )


def state_now(view: JobView, names: "Labels") -> d.PageState:
    """What the coordinator says while the job runs, or while there are no conditions; else what these say."""
    told, live = state_in_status(view.status), view.live
    if live is None or told.over or (view.status.conditions and live.phase not in ("Running", "Recovering")):
        return told
    return state(live, view.spec, names)


def _from_coordinator(
    view: JobView, live: Status, record: JobHistory, job: d.PageJob, shown: d.PageState, now: float
) -> d.Document:
    names = Labels(view.name)
    found = d.Document(
        now=now,
        job=job,
        state=shown,
        progress=progress(live, view.spec, now, shown),
        counts=d.PageCounts(
            preemptions=live.preemptions,
            takeovers=len(live.takeovers),
            notices=live.notices,
            restarts=live.restarts,
        ),
        epoch=live.epoch or None,
        grid=grid(live, names),
        others=others(live, names) if live.phase != OVER else (),
        unprotected=live.unprotected,
        memory=tuple(
            d.MemoryRow(worker=worker, label=names(worker), peak=memory.peak, limit=memory.limit)
            for worker, memory in live.memory
        ),
        traffic=tuple(account(worker, sent, names) for worker, sent in live.traffic),
        evaluation=evaluation(live, view.spec),
        checkpoint=checkpoint(live.checkpoint, now) if live.checkpoint else None,
        **history_fields(record, names),
    )
    if live.phase == "Recovering" and not found.grid:  # after a restart, until the workers are back
        return _remembered(view, found)
    return found


def _from_status(
    view: JobView, record: JobHistory | None, job: d.PageJob, shown: d.PageState, now: float
) -> d.Document:
    """A job without a coordinator: invalid, suspended, over, or only just seen."""
    written, names, training = view.status, Labels(view.name), view.spec.training
    found = d.Document(
        now=now,
        job=job,
        state=shown,
        progress=d.PageProgress(samples=training.global_batch_size, steps=training.known_steps),
        counts=d.PageCounts(preemptions=written.preemptions, takeovers=written.takeovers),
        epoch=written.epoch or None,
    )
    if record is not None:
        found = replace(found, **history_fields(record, names))
    return _remembered(view, found)


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


def progress(status: Status, spec: JobSpec, now: float, ended: d.PageState | None = None) -> d.PageProgress:
    """What a job that did not complete has trained since its newest checkpoint is not kept."""
    unfinished = ended is not None and ended.over and ended.name != Outcome.COMPLETE
    kept = (status.checkpoint.step or 0) if status.checkpoint else 0
    return d.PageProgress(
        step=status.step,
        steps=status.steps,
        stopped_early=status.stopped_early,
        grid_choice=status.grid_choice,
        done_by=date_told(status.done_by, datetime.fromtimestamp(now, UTC), status.eta_seconds),
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


def account(worker: WorkerId, found: Traffic, names: Labels) -> d.Account:
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


def state_in_status(written: BambooJobStatus) -> d.PageState:
    """The job's state as the status says it; a job without one has only just been seen."""
    name = written.state
    found = written.condition(CONDITIONS.get(name, name))
    sentence = found.message if found else ""
    over = name in ("Complete", "Failed")
    return d.PageState(name=name, tone=TONES.get(name, "idle"), sentence=sentence, over=over)


def conditions(written: BambooJobStatus) -> tuple[d.PageCondition, ...]:
    return tuple(
        d.PageCondition(
            type=c.type, status=c.status, reason=c.reason, message=c.message, at=unix(c.last_transition_time)
        )
        for c in written.conditions
    )


def _remembered(view: JobView, found: d.Document) -> d.Document:
    """The document with progress and owners as the status has them."""
    training, progress, over = view.status.training, found.progress, state_in_status(view.status).over
    owners = () if over else rows(view.plan, Labels(view.name))
    known = d.PageProgress(
        step=progress.step if training.step is None else training.step,
        steps=progress.steps if training.steps is None else training.steps,
        stopped_early=view.status.stopped_early,
        loss=progress.loss if training.loss is None else training.loss,
        samples=progress.samples,
        samples_per_second=None if over else training.samples_per_second,
        eta_seconds=None if over else training.eta_seconds,
    )
    return replace(found, progress=known, grid=owners, unknown=(OWNERS_ONLY,) if owners else ())


def _counts(written: BambooJobStatus, counts: d.PageCounts) -> d.PageCounts:
    """The coordinator counts from its own start; the status has counted on, and neither falls."""
    return d.PageCounts(
        preemptions=max(counts.preemptions, written.preemptions),
        takeovers=max(counts.takeovers, written.takeovers),
        restarts=max(counts.restarts or 0, written.restarts),
        notices=counts.notices if counts.preemptions >= written.preemptions else None,
    )


def _evaluation_in_status(view: JobView) -> d.PageEvaluation | None:
    """The newest evaluation as the status remembers it, of a job whose coordinator is new or gone."""
    known, wanted = view.status.training.evaluation, view.spec.training.evaluation
    if known is None or wanted is None:
        return None
    return d.PageEvaluation(
        step=known.step,
        metric=wanted.metric,
        metrics=known.metrics,
    )


def _checkpoint_in_status(view: JobView, live: d.PageCheckpoint | None) -> d.PageCheckpoint | None:
    """The checkpoints of a job; None if it keeps none. live: as the coordinator has it."""
    written, known = view.status, live
    if known is None and view.spec.checkpoint is not None:
        every = view.spec.checkpoint.every_steps or USUAL_STEPS
        known = d.PageCheckpoint(place=view.checkpoint_place, every_steps=every)
    if known is None:
        return None
    if known.at is None:
        newest = written.checkpoint
        step = known.step if newest.last_step is None else newest.last_step
        known = replace(known, step=step, at=unix(newest.last_time))
    return replace(known, restores=max(known.restores, written.restores))


def unix(time: datetime | None) -> float | None:
    return None if time is None else time.timestamp()
