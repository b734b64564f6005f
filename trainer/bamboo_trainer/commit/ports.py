"""Interfaces that commits use: the channel to the coordinator, the job's history, the context of an engine's parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bamboo_core.control.protocol import Message
from bamboo_core.planning.plan import Layout, Plan
from bamboo_trainer.commit.commit_log import CommitLog
from bamboo_trainer.frames import Commit, Commits, HistoryMark
from bamboo_trainer.routing import Outbox, PlanState
from bamboo_trainer.stage.stage_states import StageStates


class Coordinator(Protocol):
    """The channel to the coordinator. Its answers reach the engine later, through the caller that runs the engine."""

    def tell(self, message: Message) -> None:
        """Send a message without waiting, from any thread."""


class History:
    """The interface of the job's history. This class keeps none; `worker.history_keeper` has a subclass that does.

    The engine's thread calls the methods, so none of them may block.
    """

    def mark(self, seconds: float, rate: float | None) -> HistoryMark | None:
        """As the root, return the mark that the next commit carries for the history; None if no history is kept.
        seconds: since the commit before; 0 if unknown. rate: the learning rate, if known.
        """
        return None

    def committed(self, step: int, commit: Commit) -> None:
        """Record a step that any root has committed. step: counts from 0."""

    def take_role(self, plan: Plan, leads: bool) -> None:
        """Record whether this worker is the root (`leads`) under a plan."""

    def informed(self) -> None:
        """As the root, record that it no longer waits for other workers' commits. May be called more than once."""

    def unwritten(self) -> Sequence[Commits]:
        """Return the commits that may not be written yet, in batches, to send them to other workers."""
        return ()

    def heard(self, commits: Commits) -> None:
        """Record commits that another worker has sent because they may not be written yet."""


class NoHistory(History):
    """A history that keeps nothing. missed: called whenever this worker becomes the root, to warn the user."""

    def __init__(self, missed: Callable[[], None] = lambda: None) -> None:
        self._missed, self._leads = missed, False

    def take_role(self, plan: Plan, leads: bool) -> None:
        if leads and not self._leads:
            self._missed()
        self._leads = leads


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitContext:
    """The collaborators that all parts of an engine share.

    plan: the plans known here. states: the states of the stages held here. log: the commits known here.
    """

    plan: PlanState
    outbox: Outbox
    states: StageStates
    log: CommitLog
    coordinator: Coordinator

    def generation(self, step: int) -> int:
        """Return the generation of the step's layout; if unknown, that of the plan's first layout."""
        known = self.log.generation(step)
        return self.plan.current.layouts[0].generation if known is None else known

    def layout(self, step: int) -> Layout | None:
        """Return the step's layout; None if the plan in force does not have that layout."""
        generation = self.generation(step)
        return next((layout for layout in self.plan.current.layouts if layout.generation == generation), None)
