"""What runs beside a training and hears of it: `Task.callbacks`. docs/history.md is the introduction.

Nothing here changes the training; `bamboo_trainer.decisions` does.
"""

from collections.abc import Callable
from typing import Any

from bamboo_core.history.records import EvaluationRecord, EventRecord, StepRecord
from bamboo_trainer.loggers.interface import LoggerFacts


class Callback:
    """Called in one place, the root worker, by a thread of its own, one call at a time, in the history's order.

    fails_job: an exception ends the job (`CallbackFailed`); otherwise it is told, and this callback is not called any
      more, unless the job begins anew from a checkpoint.
    facts: what it may know of the job.
    """

    fails_job: bool = False

    def __init__(self, facts: LoggerFacts) -> None:
        self.facts = facts

    def on_step(self, step: StepRecord) -> None:
        """A step is committed, and in the history: its loss, metrics, gradient norm, rate and others."""

    def on_evaluation(self, evaluation: EvaluationRecord) -> None:
        """The state after `evaluation.step` steps was evaluated; told with the step that follows it."""

    def on_checkpoint(self, step: int) -> None:
        """The state after so many steps is durable."""

    def on_disruption(self, event: EventRecord) -> None:
        """A worker is to go, is lost or taken over, or the job goes back to a checkpoint: `event.reason` says which."""

    def on_end(self, steps: int) -> None:
        """Training is complete, with so many steps. A job that fails or is suspended does not come to this."""

    def state_dict(self) -> Any:
        """What it keeps, as values of JSON, 64 KiB at most: kept together with how far it has been called, and once
        more for each checkpoint.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Goes on from what it has kept: on a new root, or, back at a checkpoint, from what it kept at that one. Not
        called if it has kept nothing.
        """


MakeCallback = Callable[[LoggerFacts], Callback]  # such as a class
