"""Text about a job for people: age, progress, cost, protection, and what suspending or deleting it would lose. Pure."""

from collections.abc import Sequence
from datetime import datetime

from bamboo_core.coordinator.events import CheckpointSummary
from bamboo_core.coordinator.protection import OFF
from bamboo_core.job.budget_reach import date_told, seconds_late
from bamboo_core.text import count as count
from bamboo_core.text import duration as duration
from bamboo_core.text import metrics
from bamboo_core.view.job_view import CellIndex, JobView

STALE_SECONDS = 60.0  # progress is written every 15 s
ROLLING, STALLED = "RollingOut", "RolloutStalled"  # reasons of the condition WorkersUpdated


def age(since: datetime | None, now: datetime) -> str:
    """Return how long ago `since` was, in the short form of kubectl; "-" if that is unknown."""
    return "-" if since is None else short_age((now - since).total_seconds())


def short_age(seconds: float) -> str:
    """Return a duration in the short form of kubectl: 45s, 12m, 5h, 3d."""
    seconds = max(0, int(seconds))
    for size, unit, most in ((1, "s", 120), (60, "m", 120 * 60), (3600, "h", 48 * 3600)):
        if seconds < most:
            return f"{seconds // size}{unit}"
    return f"{seconds // 86400}d"


def progress(job: JobView) -> str:
    """Return a line with the step and the loss and, while the job trains, its speed and the time left."""
    training = job.status.training
    runs = job.status.ended is None and (job.live is not None or job.status.holds("Running"))
    early = job.live.stopped_early if job.live is not None else job.status.stopped_early
    words = progress_words(
        job.step,
        job.steps,
        loss=training.loss,
        samples_per_second=training.samples_per_second if runs else None,
        eta_seconds=training.eta_seconds if runs else None,
        stopped_early=bool(early),
    )
    return ", ".join(words)


def progress_words(
    step: int,
    steps: int | None,
    *,
    loss: float | None,
    samples_per_second: float | None,
    eta_seconds: float | None,
    stopped_early: bool = False,
) -> list[str]:
    """Return phrases on step ("?" for unknown `steps`), early stop, loss, speed and time left, without unknown ones."""
    words = [f"step {step}/{steps or '?'}", *["stopped early"] * stopped_early]
    if loss is not None:
        words.append(f"loss {loss:.4f}")
    if samples_per_second is not None:
        words.append(f"{samples_per_second:.1f} samples/s")
    if eta_seconds is not None:
        words.append(f"ETA {duration(eta_seconds)}")
    return words


def evaluation(job: JobView) -> str:
    """Return a line with the newest evaluation; "" if there is none."""
    newest = job.status.training.evaluation
    if newest is None or not newest.metrics:
        return ""
    return f"evaluation after step {newest.step}: {metrics(newest.metrics)}"


def counts(job: JobView) -> str:
    """Return a line of counts: ready pipelines and workers if any are wanted, preemptions, takeovers, any failures."""
    status, workers = job.status, job.status.workers
    parts = []
    if workers.desired:
        parts.append(f"{status.pipelines.ready} of {count(status.pipelines.desired, 'pipeline')}")
        parts.append(f"{workers.ready} of {count(workers.desired, 'worker')} ready")
    parts += [count(status.preemptions, "preemption"), count(status.takeovers, "takeover")]
    if status.restarts:
        parts.append(count(status.restarts, "failure"))
    return ", ".join(parts)


def checkpoint(job: JobView, now: datetime) -> str:
    """Return a line on the newest checkpoint and the number of restores; "" if the job keeps no checkpoints."""
    if job.live is not None and job.live.checkpoint is not None:
        return checkpoint_of_run(job.live.checkpoint)
    if job.spec.checkpoint is None:
        return ""
    known = job.status.checkpoint
    age = (now - known.last_time).total_seconds() if known.last_time else None
    return "; ".join([_newest(known.last_step, age, job.checkpoint_place), *_went_back(job.status.restores)])


def checkpoint_of_run(kept: CheckpointSummary) -> str:
    """Return a line on checkpoints: `checkpoint: step 200, 3:05 old, in s3://bucket/llama; 12 steps repeated (40s)`."""
    parts = [_newest(kept.step, kept.age, kept.place)]
    if kept.writing:
        layers = count(kept.writing.layers, "layer")
        parts.append(f"writing step {kept.writing.step}, {kept.writing.written} of {layers}")
    parts += _went_back(kept.counts.restored)
    if kept.counts.repeated:
        price = f" ({duration(kept.counts.repeated_seconds)})" if kept.counts.repeated_seconds else ""
        parts.append(f"{count(kept.counts.repeated, 'step')} repeated{price}")
    return "; ".join(parts)


def _newest(step: int | None, age: float | None, place: str) -> str:
    newest = "none yet" if step is None else f"step {step}"
    if step is not None and age is not None:
        newest += f", {duration(max(0.0, age))} old"
    return f"checkpoint: {newest}" + (f", in {place}" if place else "")


def _went_back(restores: int) -> list[str]:
    return [f"went back {count(restores, 'time')}"] if restores else []


def date(job: JobView, now: datetime) -> str:
    """Return a phrase on whether a local run will be done by its budget's date; "" on a cluster or without a date."""
    return date_told(job.live.done_by, now, job.live.eta_seconds) if job.live is not None else ""


def is_late(job: JobView, now: datetime) -> bool:
    """Return whether a local run is expected to finish after its budget's date; False if that is unknown."""
    live = job.live
    return bool(live and live.done_by and (seconds_late(live.done_by, now, live.eta_seconds) or 0.0) > 0)


def grid_choice(job: JobView) -> str:
    """Return a local run's chosen grid with the reason; "" if none is chosen, or on a cluster."""
    return f"grid: {job.live.grid_choice}" if job.live is not None and job.live.grid_choice else ""


def cost(job: JobView) -> str:
    """Return the cost so far, per hour and at the end, and the budget; "" if neither a price nor a budget is known."""
    spent = job.status.cost
    parts = [f"{spent.total} so far"] if spent.total is not None else []
    if spent.per_hour is not None and job.status.ended is None:
        parts.append(f"{spent.per_hour} an hour")
        whole = job.cost_at_end
        parts += [] if whole is None else [f"about {whole:.{4 if whole < 1 else 2}f} at the end"]
    if job.spec.budget is not None and job.spec.budget.money is not None:
        parts.append(f"of a budget of {job.spec.budget.money}")
    if parts and job.unpriced:
        parts.append(f"without pool {', '.join(job.unpriced)}, which has no price")
    return ", ".join(parts)


def protected(job: JobView, now: datetime) -> str:
    """Return the job's protection for a table: yes, no, off (no redundancy), - (nothing runs) or ? (status is old)."""
    condition = job.status.condition("Protected")
    if condition is None or job.status.ended or job.status.holds("Suspended") or condition.reason == "NotRunning":
        return "-"
    if stale(job, now):
        return "?"
    return "yes" if condition.holds else "off" if condition.reason == OFF else "no"


def protection(job: JobView, now: datetime) -> str:
    """Return a line about the job's protection and its reason; "" if nothing runs."""
    condition, word = job.status.condition("Protected"), protected(job, now)
    if condition is None or word == "-":
        return ""
    known = "not known, it was " if word == "?" else ""
    return f"protected: {known}{'yes' if condition.holds else 'no'}, {condition.message} ({condition.reason})"


def rollout(job: JobView) -> str:
    """Return the progress of the rollout of a changed spec, which replaces the workers; "" if there is none."""
    condition = job.status.condition("WorkersUpdated")
    if condition is None or condition.reason not in (ROLLING, STALLED) or job.status.ended or job.suspended:
        return ""
    return f"rollout {'stalled' if condition.reason == STALLED else 'progressing'}: {condition.message}"


def place(cell: CellIndex) -> str:
    return f"stage {cell[1]} of pipeline {cell[0]}"


def places(cells: Sequence[CellIndex]) -> str:
    return " and ".join(place(cell) for cell in cells)


def suspending(job: JobView) -> str | None:
    """Return a sentence on the steps that suspending the job now would lose; None if it loses none."""
    step, kept = job.step, job.status.checkpoint.last_step
    if job.status.ended or job.suspended or not step:
        return None
    if job.spec.checkpoint is None:
        return f"{job.name} saves no checkpoints: it will start from step 0, which loses its {count(step, 'step')}"
    if job.status.holds("Running") or kept == step:
        return None  # a running job's state is saved before it stops
    if kept is None:
        return f"{job.name} has no checkpoint yet: it will start from step 0, which loses its {count(step, 'step')}"
    lost = step - kept
    return f"{job.name} will continue from its checkpoint at step {kept}, which loses {count(lost, 'step')}"


def deleting(job: JobView) -> str | None:
    """Return a sentence on the progress that deleting the job now would lose; None if the job is over."""
    if job.status.ended:
        return None
    return f"{job.name} is not over ({job.status.state}, {progress(job)}); its progress is lost"


def outcome(job: JobView) -> str:
    """Return how the job ended, else why it does not train, else its state."""
    end = job.status.ended
    if end is not None:
        return f"{end.type}: {end.message}" if end.message else f"{end.type}: {end.reason}"
    accepted = job.status.condition("Accepted")
    if accepted is not None and not accepted.holds:
        return f"not accepted: {accepted.message}"
    return f"{job.status.state}: {job.held_back}" if job.held_back else job.status.state


def stale(job: JobView, now: datetime) -> str:
    """Return a sentence if a running job has reported no progress for a while; else ""."""
    training = job.status.training
    reported, speed = training.last_reported_time, training.samples_per_second
    if job.status.ended or job.suspended or not job.status.holds("Running") or reported is None:
        return ""
    step_seconds = job.spec.training.global_batch_size / speed if speed else 0.0
    if (now - reported).total_seconds() < STALE_SECONDS + 2 * step_seconds:
        return ""
    return f"no progress has been reported for {age(reported, now)}: steps take very long, or no operator is running"


def why_waiting(job: JobView) -> str | None:
    """Return why a job on a cluster that should train does not; None if there is no reason, or for a local run."""
    if job.live is not None:
        return None
    if job.status.ended or job.suspended:
        return job.held_back or None
    for kind in ("Accepted", "WorkersReady"):
        condition = job.status.condition(kind)
        if condition is not None and not condition.holds:
            return condition.message
    if not job.status.conditions:
        return "no operator has seen this job yet: is bamboo-operator running, and does it watch this namespace?"
    return None
