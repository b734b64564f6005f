"""What commits need of a worker: the coordinator's channel, the job's history, and the context of an engine's parts."""

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
    """Sends messages to the coordinator. Its answers reach the engine later, through the caller that runs it."""

    def tell(self, message: Message) -> None:
        """Send a message without waiting, from any thread."""


class History:
    """The job's history, which is not kept here; `worker.history_keeper` has one that is.

    Called on the engine's thread; no method may block.
    """

    def mark(self, seconds: float, rate: float | None) -> HistoryMark | None:
        """As the root, return the mark that the next commit carries for the history; None if no history is kept.
        seconds: since the commit before; 0 if unknown. rate: the learning rate, if known.
        """
        return None

    def committed(self, step: int, commit: Commit) -> None:
        """Record a step that any root has committed. step: the number of steps committed before."""

    def take_role(self, plan: Plan, leads: bool) -> None:
        """Note whether this worker is now the root."""

    def informed(self) -> None:
        """As the root: all other workers have sent what they know. May be called again."""

    def unwritten(self) -> Sequence[Commits]:
        """Return, in pieces, the commits not known to be written, for a new root or a worker that joins."""
        return ()

    def heard(self, commits: Commits) -> None:
        """Record commits that another worker does not know to be written."""


class NoHistory(History):
    """Keeps no history. missed: called when this worker becomes the root."""

    def __init__(self, missed: Callable[[], None] = lambda: None) -> None:
        self._missed, self._leads = missed, False

    def take_role(self, plan: Plan, leads: bool) -> None:
        if leads and not self._leads:
            self._missed()
        self._leads = leads


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitContext:
    """The collaborators that all parts of an engine share.

    plan: the plans known here. states: of the stages held here. log: the commits known here.
    """

    plan: PlanState
    outbox: Outbox
    states: StageStates
    log: CommitLog
    coordinator: Coordinator

    def generation(self, step: int) -> int:
        """Return the generation of that step's layout; if unknown, the first one in force."""
        known = self.log.generation(step)
        return self.plan.current.layouts[0].generation if known is None else known

    def layout(self, step: int) -> Layout | None:
        """Return the step's layout; None if its plan has not arrived."""
        generation = self.generation(step)
        return next((layout for layout in self.plan.current.layouts if layout.generation == generation), None)
