"""The completion of a job that has done all its steps."""

from bamboo_core.coordinator.checkpointing import checkpoints, final_checkpoint
from bamboo_core.coordinator.events import Outcome
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.job.status import EARLY_STOPPED
from bamboo_core.text import count


def finish_if_done(turn: Turn) -> None:
    """Finish the job when all cells of a layout have finished and the last state is evaluated, compared and saved."""
    state = turn.state
    if state.plan is None or not state.ending.finished or state.checkpoints.writing or checkpoints.is_tidying(turn):
        return  # a checkpoint is still being written
    if state.step < state.spec.training.steps:
        return  # a decision has ended training, but the root has not reported it yet
    evaluated = state.terms.early_stop is not None or state.spec.training.steps in state.progress.evaluations
    if state.spec.training.evaluation and not evaluated:
        return  # the root has not reported the last evaluation yet
    finished, stages = dict(state.ending.finished), len(state.plan.stages)
    if not any(finished.keys() >= set(layout.cells(stages)) for layout in state.plan.layouts):
        return
    if not _is_compared(state):
        return  # not all holders of the last state have reported its sums
    if not final_checkpoint.begin(turn):
        _complete(turn)


def _is_compared(state: CoordinatorState) -> bool:
    """Return whether all holders of the last state have reported equal sums of it."""
    plan, training = state.current_plan, state.spec.training
    holders = [set(workers) & state.workers.keys() for workers in state.certain_holders(plan)]
    return not training.deterministic or state.guard.are_equal(plan.origin, training.steps, holders)


def _complete(turn: Turn) -> None:
    lacking = "; there is no checkpoint of the last state" if final_checkpoint.is_missing(turn.state) else ""
    steps, stop = turn.state.spec.training.steps, turn.state.terms.early_stop
    if stop is None:
        turn.finish(Outcome.COMPLETE, "Complete", f"all {steps} steps are done{lacking}")
        return
    text = f"{stop.why}; the last one is that after {steps} of {count(stop.wanted_steps, 'step')}"
    turn.finish(Outcome.COMPLETE, EARLY_STOPPED, f"{text}{lacking}")
