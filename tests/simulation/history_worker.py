"""A simulated worker's history keeper and followers, without threads, and a callback that records its calls."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from bamboo_core.control.protocol import Message
from bamboo_core.history.files import HistoryFiles
from bamboo_core.history.records import StepRecord
from bamboo_trainer.callbacks import Callback, MakeCallback
from bamboo_trainer.loggers import LoggerFacts
from bamboo_trainer.worker.followers import TurnThread, followers_of
from bamboo_trainer.worker.history_keeper import HistoryKeeper, Rates

FACTS = LoggerFacts(job="job", run="r")


class TestTurns(TurnThread):
    """A `TurnThread` without a thread, whose turns the test runs."""

    __test__ = False

    def __init__(self, turn: Callable[[bool], None], seconds: float, name: str, warn: Callable[[str], None]) -> None:
        super().__init__(turn, seconds, name, warn)
        self.due = self.begun = False

    def wake(self) -> None:
        self.due = self.begun = True

    def end(self) -> None:
        self.take(last=True)

    def join(self, seconds: float) -> None:
        """Do nothing, since the last turn was taken in `end`."""

    def take(self, *, last: bool = False) -> None:
        self.due = False
        if self.begun:
            super().take(last=last)


class HistoryWorker:
    """A worker's history keeper and its followers, which call the job's callbacks. `turn` runs them all."""

    def __init__(
        self,
        files: HistoryFiles,
        rates: Rates,
        callbacks: Mapping[str, MakeCallback],
        tell: Callable[[Message], None],
    ) -> None:
        self.turns: list[TestTurns] = []
        followers = followers_of({}, callbacks, FACTS, files, tell, self._made)
        self.keeper = HistoryKeeper(files, rates, tell, followers, self._made)

    def _made(self, *arguments: Any) -> TestTurns:
        self.turns.append(TestTurns(*arguments))
        return self.turns[-1]

    def turn(self) -> None:
        """Take the keeper's turn, then the followers'."""
        for turns in reversed(self.turns):
            turns.take()


class Steps(Callback):
    """A callback that records attempt, step and loss of each call, and the number of steps at the end.

    heard: attempt and step of the calls of all instances.
    """

    heard: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, facts: LoggerFacts) -> None:
        super().__init__(facts)
        self.called: list[Any] = []

    def on_step(self, step: StepRecord) -> None:
        self.called.append([step.attempt, step.step, step.loss])
        self.heard.append((step.attempt, step.step))

    def on_end(self, steps: int) -> None:
        self.called.append(steps)

    def state_dict(self) -> Any:
        return self.called

    def load_state_dict(self, state: Any) -> None:
        self.called = list(state)
