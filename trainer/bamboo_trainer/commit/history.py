"""What the engine tells of its commits for the job's history, and asks of whoever keeps it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from bamboo_core.planning.plan import Plan
from bamboo_trainer.frames.payloads import Commit, HistoryMark, Unwritten


class History(Protocol):
    """Called by the engine's thread; nothing here may take long."""

    def mark(self, origin: int, seconds: float, rate: float | None) -> HistoryMark | None:
        """As the root: what the next commit says for the history; None if none is kept.

        seconds: since the commit before; 0 if not known. rate: the learning rate, if it is known.
        """

    def committed(self, origin: int, step: int, commit: Commit) -> None:
        """A step is committed, by whomever."""

    def take_role(self, plan: Plan, leads: bool) -> None:
        """This worker is the root from now on, or it is not."""

    def informed(self) -> None:
        """As the root: all others have told what they know. May be said again."""

    def unwritten(self) -> Sequence[Unwritten]:
        """What is not known to be written, for a new root, and for who joins: in pieces."""

    def heard(self, records: Unwritten) -> None:
        """Another worker has told what it does not know to be written."""


class NoHistory:
    """None is kept. missed: called when this worker becomes the root."""

    def __init__(self, missed: Callable[[], None] = lambda: None) -> None:
        self._missed, self._leads = missed, False

    def mark(self, origin: int, seconds: float, rate: float | None) -> HistoryMark | None:
        return None

    def committed(self, origin: int, step: int, commit: Commit) -> None:
        pass

    def take_role(self, plan: Plan, leads: bool) -> None:
        if leads and not self._leads:
            self._missed()
        self._leads = leads

    def informed(self) -> None:
        pass

    def unwritten(self) -> Sequence[Unwritten]:
        return ()

    def heard(self, records: Unwritten) -> None:
        pass
