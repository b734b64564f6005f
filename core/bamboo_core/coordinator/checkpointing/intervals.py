"""How many steps there are from one checkpoint to the next, if the manifest does not say it. Pure.

What a checkpoint costs is weighed against the steps that are done again if the job goes back to it: the interval of
Young (1974) and Daly (2006), sqrt(2 x cost x time between losses that make a job go back). Both are those of this job.
"""

from math import ceil, sqrt
from typing import Final

from bamboo_core.coordinator.checkpoint_counts import RestoreCause
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.job.spec import USUAL_STEPS, CheckpointSpec
from bamboo_core.planning.plan import Cell

USUAL_SECONDS: Final = 600.0  # from one to the next at most
LEAST_SECONDS: Final = 30.0  # and at least, so that a store is not asked all the time
MOST_WRITING: Final = 0.25  # of the time, in which something is written
WRITING_COST: Final = 0.25  # of training, while a checkpoint is written beside it; measured, docs/benchmarks.md
USUAL_COST: Final = 1.0  # second, of a checkpoint as long as none is saved
CALM_SECONDS: Final = 4 * 3600.0  # that any job is taken to have trained with a single loss before it began
CALM_WITHOUT_COPIES: Final = 3600.0  # the same of losses of a worker


def interval(state: CoordinatorState, spec: CheckpointSpec) -> int:
    """Steps: the manifest's, else as many as `best_seconds` allow, and USUAL_STEPS at most; but so many that writing
    takes no more than MOST_WRITING of the time.
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
    """From one checkpoint to the next. cost: seconds of training that one costs; writing: seconds until it is there;
    between_losses: seconds from one loss that makes the job go back to the next.
    """
    least = max(LEAST_SECONDS, writing / MOST_WRITING)
    return max(least, min(USUAL_SECONDS, sqrt(2 * cost * between_losses)))


def seconds_between_losses(state: CoordinatorState, step: float) -> float:
    """Seconds of training from one loss that nobody can take over to the next, as far as the job's history tells.
    While a stage has a single holder any loss may be one. step: seconds of a usual one.
    """
    counts = state.checkpoints.counts
    trained = step * (state.progress.trained + counts.repeated)
    fatal = sum(counts.restores.get(cause, 0) for cause in (RestoreCause.STAGE_LOST, RestoreCause.WORKERS_GONE))
    rate = (fatal + 1) / (trained + CALM_SECONDS)
    if not has_copies(state):
        rate += (state.membership.preemptions + 1) / (trained + CALM_WITHOUT_COPIES)
    return 1 / rate


def has_copies(state: CoordinatorState) -> bool:
    """Whether each stage is held by two workers in step."""
    plan = state.plan
    return plan is not None and all(_is_held_twice(state, Cell(0, stage)) for stage in range(len(plan.stages)))


def _is_held_twice(state: CoordinatorState, cell: Cell) -> bool:
    """Looks no further than the first other holder: this is asked after each event."""
    plan = state.current_plan
    if any((cell, worker) in state.plans.synced for worker in plan.at(cell).replicas):
        return True
    others = (plan.at(Cell(d, cell.stage)).owner for d in range(1, plan.target.pipelines))
    return any(owner != plan.at(cell).owner for owner in others)
