"""Callbacks of a training, which follow it without changing it: `Task.callbacks`. docs/history.md introduces them.

Decisions, which do change it, are in `bamboo_trainer.decisions`.
"""

from collections.abc import Callable
from typing import Any

from bamboo_core.history.records import EvaluationRecord, EventRecord, StepRecord
from bamboo_trainer.loggers import LoggerFacts


class Callback:
    """Base class of callbacks, which follow a job's training. Only the root worker calls them, from a separate thread,
    one call at a time, in the history's order.

    fails_job: if True, an exception ends the job (`CallbackFailed`); if False, it is reported, and the callback is not
    called again unless the job restarts from a checkpoint. facts: the job's name, run and history folder.
    """

    fails_job: bool = False

    def __init__(self, facts: LoggerFacts) -> None:
        self.facts = facts

    def on_step(self, step: StepRecord) -> None:
        """Handle a committed step: its loss, metrics, gradient norm, learning rate and others."""

    def on_evaluation(self, evaluation: EvaluationRecord) -> None:
        """Handle the evaluation of the state after `evaluation.step` steps; called before the next step's `on_step`."""

    def on_checkpoint(self, step: int) -> None:
        """Handle a durable checkpoint of the state after `step` steps."""

    def on_disruption(self, event: EventRecord) -> None:
        """Handle a worker's notice, loss, end or leaving, a takeover, or a restore's start or end (`event.reason`)."""

    def on_end(self, steps: int) -> None:
        """Handle the end of a complete training, after `steps` steps; not called if a job fails or is suspended."""

    def state_dict(self) -> Any:
        """Return the callback's state as JSON values, 64 KiB at most. It is saved with the callback's position in the
        history, and once more for each recent checkpoint.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore the callback's state: on a new root the newest state, after a return to a checkpoint the state saved
        for it or, without one, for an earlier checkpoint. Not called without a saved state.
        """


MakeCallback = Callable[[LoggerFacts], Callback]  # such as a class
