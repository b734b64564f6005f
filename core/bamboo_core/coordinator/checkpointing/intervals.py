"""The number of steps between checkpoints, if the manifest does not set it. Pure functions.

The interval of Young (1974) and Daly (2006) balances a checkpoint's cost with the steps repeated after a restore:
sqrt(2 x cost x time between losses that make a job go back), both estimated from priors and the job's history.
"""

from math import ceil, sqrt
from typing import Final

from bamboo_core.coordinator.events import RestoreCause
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.job.spec import USUAL_STEPS, CheckpointSpec

USUAL_SECONDS: Final = 600.0  # the longest interval
LEAST_SECONDS: Final = 30.0  # the shortest interval, which spares the store
MOST_WRITING: Final = 0.25  # largest share of time in which a checkpoint is being written
WRITING_COST: Final = 0.25  # share of training lost while a checkpoint is written; measured, docs/benchmarks.md
USUAL_COST: Final = 1.0  # seconds that a checkpoint costs, until one is saved
CALM_SECONDS: Final = 4 * 3600.0  # prior: training time with one loss that made the job go back
CALM_WITHOUT_COPIES: Final = 3600.0  # prior: training time with one lost worker, for stages with a single holder


def interval(state: CoordinatorState, spec: CheckpointSpec) -> int:
    """Return the number of steps between checkpoints: the manifest's, else `best_seconds` in steps of usual duration.

    If the manifest sets none, the result is USUAL_STEPS until steps are timed. Later it exceeds USUAL_STEPS only if
    writing would otherwise take more than the share MOST_WRITING of the time.
    """
    if spec.every_steps is not None:
        return spec.every_steps
    step = state.usual_step
    if not step:
        return USUAL_STEPS
    counts = state.checkpoints.counts
    saved = counts.durations.count
    writing = counts.durations.total / saved if saved else 0.0
    cost = counts.stalls.total / saved + WRITING_COST * writing if saved else USUAL_COST
    seconds = best_seconds(cost, writing, seconds_between_losses(state, step))
    return max(1, min(USUAL_STEPS, int(seconds / step)), ceil(writing / MOST_WRITING / step))


def best_seconds(cost: float, writing: float, between_losses: float) -> float:
    """Return the seconds from one checkpoint to the next: Young's and Daly's formula, limited to USUAL_SECONDS, but at
    least LEAST_SECONDS and long enough that writing takes at most the share MOST_WRITING of the time.
    cost: seconds of training that a checkpoint costs. writing: seconds until it is complete. between_losses: seconds
    from one loss that makes the job go back to the next.
    """
    least = max(LEAST_SECONDS, writing / MOST_WRITING)
    return max(least, min(USUAL_SECONDS, sqrt(2 * cost * between_losses)))


def seconds_between_losses(state: CoordinatorState, step: float) -> float:
    """Return the expected seconds of training between losses that make the job go back, from priors and its history.

    Unless the job `has_copies` now, all preemptions so far count, too. step: seconds of a usual step.
    """
    counts = state.checkpoints.counts
    trained = step * (state.progress.trained + counts.repeated)
    fatal = sum(counts.restores.get(cause, 0) for cause in (RestoreCause.STAGE_LOST, RestoreCause.WORKERS_GONE))
    rate = (fatal + 1) / (trained + CALM_SECONDS)
    if not has_copies(state):
        rate += (state.membership.preemptions + 1) / (trained + CALM_WITHOUT_COPIES)
    return 1 / rate


def has_copies(state: CoordinatorState) -> bool:
    """Return whether each stage has two or more `certain_holders`, even lost ones; False without a plan."""
    return state.plan is not None and all(len(holders) > 1 for holders in state.certain_holders(state.plan))
