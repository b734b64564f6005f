"""Consequences of a worker's end: none, a counted failure, or the end of the job.

The coordinator may learn of a worker's loss before or after its exit code, since a closed link races the report on
the worker's process. The decisions here do not depend on that order.
"""

from bamboo_core.coordinator.events import Emit, Outcome
from bamboo_core.coordinator.records.workers import WorkerEnd
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.state import Turn
from bamboo_core.job.spec import JobSpec, wanted_workers
from bamboo_core.names import EXIT_FENCED, EXIT_OK
from bamboo_core.planning.plan import WorkerId

LEAST_PATIENCE = 10  # workers lost without a commit, beyond all that the job has


def most_losses(spec: JobSpec) -> int:
    """Return how many workers the job may lose between two committed steps; preempted workers do not count."""
    return wanted_workers(spec) + max(LEAST_PATIENCE, spec.backoff_limit)


def note_end(turn: Turn, worker: WorkerId, how: str, *, disrupted: bool) -> None:
    """Record how a worker ended; the next commit drops the record. disrupted: a worker taken away, not at fault."""
    ends, end = turn.state.worker_ends, WorkerEnd(how=how, disrupted=disrupted)
    turn.put(replace(ends, since_commit={**ends.since_commit, worker: end}))


def note_exit(turn: Turn, worker: WorkerId, detail: str, exit_code: int | None, *, removed: bool) -> None:
    """Record the exit of a worker that was declared lost before; count it if it is a failure. Ignore repetitions."""
    state = turn.state
    if worker not in state.worker_ends.unexplained:
        return
    turn.put(replace(state.worker_ends, unexplained=state.worker_ends.unexplained - {worker}))
    before = state.worker_ends.since_commit.get(worker)
    if exit_code is None:
        if before and not removed:  # its removal by the shell does not tell why it had been missed
            note_end(turn, worker, detail, disrupted=True)
        return
    if exit_code == EXIT_OK and (before is None or before.disrupted):
        return
    if by_itself(exit_code):
        if before:
            note_end(turn, worker, detail, disrupted=before.disrupted)
        turn.do(Emit("WorkerEnded", f"{worker} {detail}", True))
        judge_end(turn, worker, detail, exit_code)


def by_itself(exit_code: int | None) -> bool:
    """Return whether a worker ended by itself, even with code 0: False for None, signals (negative) and EXIT_FENCED."""
    return exit_code is not None and exit_code >= 0 and exit_code != EXIT_FENCED


def judge_end(turn: Turn, worker: WorkerId, detail: str, exit_code: int | None) -> None:
    """Count a worker's failure if it ended by itself; end the job after too many failures or losses between commits."""
    if turn.is_over:
        return
    if by_itself(exit_code):
        _count(turn, f"{worker} {detail}")
    if not turn.is_over:
        stop_without_progress(turn)


def _count(turn: Turn, failure: str) -> None:
    ends = turn.state.worker_ends
    failures = (*ends.failures, failure)
    turn.put(replace(ends, failures=failures, restarts=ends.restarts + 1))
    if len(failures) > turn.state.spec.backoff_limit:
        many = len(failures) > 1
        ended = f"{len(failures)} workers failed" if many else "a worker failed"
        message = f"{ended} and no step was committed in between; {failure}"
        turn.finish(Outcome.FAILED, "BackoffLimitExceeded", message)


def stop_without_progress(turn: Turn) -> None:
    """End a job that keeps losing workers without committing a step, even if no loss counts as a failure.

    Workers that were taken away do not count; the progress deadline ends a job that loses only such workers.
    """
    lost = [f"{worker}: {end.how}" for worker, end in turn.state.worker_ends.since_commit.items() if not end.disrupted]
    if len(lost) > most_losses(turn.state.spec):
        message = f"{len(lost)} workers were lost and no step was committed in between; the last one, {lost[-1]}"
        turn.finish(Outcome.FAILED, "WorkersKeepFailing", message)
