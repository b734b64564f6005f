"""The choice of the worker that a drill takes away, and the recovery of its stages. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from bamboo.terminal import phrases
from bamboo.terminal.snapshot import RemoteWorker
from bamboo_core.kube.errors import RemoteError, UsageError
from bamboo_core.view.job_view import JobView


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimChoice:
    """The user's choice of a worker: exactly one of worker, stage and random. Raises UsageError otherwise.

    worker: its name or number. pipeline: the pipeline of `stage`, only given with it; None for pipeline 0.
    """

    worker: str | None = None
    stage: int | None = None
    pipeline: int | None = None
    random: bool = False

    def __post_init__(self) -> None:
        if [self.worker is not None, self.stage is not None, self.random].count(True) != 1:
            raise UsageError("expected one of --worker, --stage and --random")
        if self.pipeline is not None and self.stage is None:
            raise UsageError("--pipeline: expected together with --stage")


def victim(
    job: JobView,
    workers: Sequence[RemoteWorker],
    choice: VictimChoice,
    pick: Callable[[Sequence[RemoteWorker]], RemoteWorker],
) -> RemoteWorker:
    """Return the worker of the user's choice. pick: selects a worker at random.

    Raises RemoteError if the job has no such worker, or it has ended or is leaving.
    """
    if choice.worker is not None:
        return _alive(named(job, workers, choice.worker))
    if choice.random:
        training = [w for w in workers if w.alive and w.cells and w.state != "leaving"]
        if not training:
            raise RemoteError(f"no worker of {job.name} is training")
        return pick(training)
    assert choice.stage is not None
    return _alive(_owner(job, workers, choice.pipeline or 0, choice.stage))


def named(job: JobView, workers: Sequence[RemoteWorker], name: str) -> RemoteWorker:
    """Return a worker by its full name, its name without the job's, or its number: quickstart-w3, w3, 3.

    Raises RemoteError if the job has no such worker.
    """
    number = name.removeprefix("w")
    matches = [w for w in workers if name in (w.name, job.short(w.name))]
    matches += [w for w in workers if number.isdecimal() and w.number == int(number)]
    if matches:
        return matches[0]
    names = ", ".join(job.short(w.name) for w in workers[:20]) or "none"
    more = f" and {len(workers) - 20} more" if len(workers) > 20 else ""
    raise RemoteError(f"{job.name} has no worker {name}; there are: {names}{more}")


def _owner(job: JobView, workers: Sequence[RemoteWorker], pipeline: int, stage: int) -> RemoteWorker:
    if not job.plan:
        raise RemoteError(f"{job.name} has no plan yet; it is {job.status.state}")
    if pipeline >= len(job.plan):
        raise UsageError(f"--pipeline {pipeline}: the job has pipelines 0 to {len(job.plan) - 1} now")
    if stage >= len(job.plan[pipeline]):
        raise UsageError(f"--stage {stage}: the job has stages 0 to {len(job.plan[pipeline]) - 1}")
    owner = job.plan[pipeline][stage]
    worker = next((w for w in workers if w.name == owner), None)
    if worker is None:
        raise RemoteError(f"{phrases.place((pipeline, stage))} belongs to {owner}, which is gone already")
    return worker


def _alive(worker: RemoteWorker) -> RemoteWorker:
    if not worker.alive:
        raise RemoteError(f"{worker.name} has ended already ({worker.detail or worker.state})")
    if worker.state == "leaving":
        raise RemoteError(f"{worker.name} is leaving already")
    return worker


def objections(job: JobView, now: datetime, *, kill: bool) -> str | None:
    """Return a warning if taking a worker away now could cost more than a pause, else None. kill: without notice."""
    if stale := phrases.stale(job, now):
        return f"of {job.name} {stale}; without an operator nothing is taken over"
    protection = job.status.condition("Protected")
    if protection is not None and not job.protected:
        return f"{job.name} is not fully protected ({protection.message}); it could fail"
    if kill and job.spec.redundancy.mode == "None":
        return f"{job.name} has spec.redundancy.mode None: without a notice it will fail"
    return None


# recovery


def taken_over(job: JobView, before: JobView, lost: RemoteWorker) -> bool:
    """Return whether others run the lost worker's stages, and more takeovers are counted than in `before`."""
    return not job.cells(lost.name) and job.status.takeovers > before.status.takeovers


def whole(job: JobView) -> bool:
    """Return whether the job is not Degraded: each stage has its own worker and protection, by the newest spec."""
    return not job.status.holds("Degraded")
