"""A job's metrics, computed from its coordinator's status or states. job: the job's namespace and name."""

from collections import Counter

from bamboo_core.control.memory import Traffic
from bamboo_core.coordinator.events import (
    AbandonReason,
    CheckpointCounts,
    RestoreCause,
    RestoreProblem,
    Status,
    Takeover,
    WorkerState,
)
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.job.spec import JobSpec
from bamboo_core.metrics import catalog as table
from bamboo_core.metrics.exposition import MetricsPage


def progress(page: MetricsPage, job: tuple[str, str], status: Status) -> None:
    """Add a job's progress: steps, epoch, loss, metrics, speed. Adds nothing while a restarted coordinator recovers."""
    if status.phase == "Recovering":
        return
    page.add(table.JOB_STEP, status.step, *job)
    page.add_known(table.JOB_DESIRED_STEPS, status.steps, *job)
    page.add_known(table.JOB_LOSS, status.loss, *job)
    if status.evaluations:
        step, metrics = status.evaluations[-1]
        page.add(table.JOB_EVALUATED_STEP, step, *job)
        for name, value in metrics.items():
            page.add_known(table.JOB_EVALUATION, value, *job, name)
    for name, value in status.metrics:
        page.add_known(table.JOB_METRIC, value, *job, name)
    page.add_known(table.JOB_STEP_DURATION, status.step_seconds, *job)
    page.add_known(table.JOB_SAMPLES_PER_SECOND, status.samples_per_second, *job)
    page.add_known(table.JOB_ETA, status.eta_seconds, *job)
    page.add(table.JOB_EPOCH, status.epoch, *job)


def grid(page: MetricsPage, job: tuple[str, str], status: Status | None, spec: JobSpec) -> None:
    """Add the numbers of workers, pipelines, replicas and unprotected cells. status: None if the job has no workers."""
    counts = Counter(state for _, state in status.workers) if status else Counter[WorkerState]()
    for state in WorkerState:
        page.add(table.JOB_WORKERS, counts[state], *job, state.value)
    page.add(table.JOB_READY_WORKERS, status.ready if status else 0, *job)
    page.add(table.JOB_PIPELINES, len(status.grid) if status else 0, *job)
    page.add(table.JOB_UNPROTECTED_STAGES, len(status.unprotected) if status else 0, *job)
    page.add(table.JOB_DESIRED_REPLICAS, spec.redundancy.kept, *job)
    page.add_known(table.JOB_REPLICAS, status.replicas if status else 0, *job)


def slow(page: MetricsPage, job: tuple[str, str], status: Status | None) -> None:
    """Add the number of current stragglers, and for each one its own and the usual seconds for a microbatch."""
    stragglers = status.slow if status else ()
    page.add(table.JOB_STRAGGLERS, len(stragglers), *job)
    for one in stragglers:
        page.add(table.JOB_STRAGGLER_SECONDS, one.seconds, *job, one.worker, "own")
        page.add(table.JOB_STRAGGLER_SECONDS, one.usual, *job, one.worker, "usual")


def history(page: MetricsPage, job: tuple[str, str], status: Status) -> None:
    """Add a coordinator's counters (lost samples, skipped steps, restarts, preemptions, takeovers, checkpoints) and its
    workers' mean traffic. Counters start at 0 with each coordinator, so their increase is right even if an earlier
    coordinator had counted more (see the operator's `JobMeter`).
    """
    page.add(table.JOB_LOST_SAMPLES, status.trained_without, *job)
    page.add(table.JOB_SKIPPED_STEPS, status.skipped_steps, *job)
    page.add(table.JOB_RESTARTS, status.restarts, *job)
    page.add(table.JOB_PREEMPTIONS, status.notices, *job, "true")
    page.add(table.JOB_PREEMPTIONS, status.preemptions - status.notices, *job, "false")
    takeovers = status.takeovers
    for notice in (True, False):
        pauses = table.JOB_TAKEOVER_PAUSE.histogram(t.pause_ms / 1e3 for t in takeovers if t.notice is notice)
        page.add_histogram(table.JOB_TAKEOVER_PAUSE, pauses, *job, str(notice).lower())
    for phase in table.PHASES:
        parts = table.JOB_TAKEOVER_PHASE.histogram(_milliseconds(t, phase) / 1e3 for t in takeovers)
        page.add_histogram(table.JOB_TAKEOVER_PHASE, parts, *job, phase)
    page.add(table.JOB_TAKEOVER_PASSES, sum(t.forwards for t in takeovers), *job, "forward")
    page.add(table.JOB_TAKEOVER_PASSES, sum(t.backwards for t in takeovers), *job, "backward")
    for kind in Traffic.__struct_fields__ if status.traffic else ():
        mean = sum(sent.by_kind()[kind] for _, sent in status.traffic) / len(status.traffic)
        page.add(table.JOB_STEP_SENT, mean, *job, kind)
    if status.checkpoint is not None:
        _checkpoints(page, job, status.checkpoint.counts)


def checkpoint(page: MetricsPage, job: tuple[str, str], *, step: int, every_steps: int, age: float | None) -> None:
    """Add the step, interval and age of a job's newest checkpoint. age: in seconds; None if there is no checkpoint."""
    page.add(table.JOB_CHECKPOINT_STEP, step, *job)
    page.add(table.JOB_CHECKPOINT_EVERY, every_steps, *job)
    page.add_known(table.JOB_CHECKPOINT_AGE, age, *job)


def _checkpoints(page: MetricsPage, job: tuple[str, str], counts: CheckpointCounts) -> None:
    page.add_histogram(table.JOB_CHECKPOINT_DURATION, counts.durations, *job)
    page.add_histogram(table.JOB_CHECKPOINT_STALL, counts.stalls, *job)
    page.add(table.JOB_CHECKPOINT_BYTES, counts.bytes, *job)
    for reason in AbandonReason:
        page.add(table.JOB_CHECKPOINTS_ABANDONED, counts.abandoned.get(reason, 0), *job, reason.value)
    for cause in RestoreCause:
        page.add(table.JOB_RESTORES, counts.restores.get(cause, 0), *job, cause.value)
    for problem in RestoreProblem:
        page.add(table.JOB_RESTORE_PROBLEMS, counts.problems.get(problem, 0), *job, problem.value)
    page.add(table.JOB_REPEATED_STEPS, counts.repeated, *job)
    page.add(table.JOB_REPEATED_SECONDS, counts.repeated_seconds, *job)


def _milliseconds(takeover: Takeover, phase: str) -> float:
    return {"decide": takeover.decide_ms, "reform": takeover.reform_ms, "recompute": takeover.recompute_ms}[phase]


def useful_seconds(before: CoordinatorState, after: CoordinatorState) -> float:
    """Return the useful worker-seconds of steps committed between two states of a coordinator; 0.0 if none was timed.

    Each worker that owns a cell counts in each of these steps with the newest step's duration, or the usual one if that
    is shorter. So pauses, spare workers, and repetitions in a step or after a return to a checkpoint do not count.
    """
    steps = after.progress.trained - before.progress.trained
    if (
        steps <= 0
        or after.plan is None
        or after.progress.step_seconds is before.progress.step_seconds
        or not after.progress.step_seconds
    ):
        return 0.0
    latest = after.progress.step_seconds[-1]
    seconds = latest if before.usual_step is None else min(latest, before.usual_step)
    owners = {a.owner for row in after.plan.pipelines for a in row}
    return steps * seconds * len(owners)
