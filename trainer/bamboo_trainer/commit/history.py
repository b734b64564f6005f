"""What the engine tells of its commits for the job's history, and asks of whoever keeps it."""

from typing import Protocol

from bamboo.history.records import StepRecord
from bamboo.planning.plan import Plan
from bamboo_trainer.transport.payloads import Commit, HistoryMark, Unwritten


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

    def unwritten(self) -> Unwritten:
        """What is not known to be written, for a new root."""

    def heard(self, records: Unwritten) -> None:
        """The same of another worker."""


class NoHistory:
    """None is kept."""

    def mark(self, origin: int, seconds: float, rate: float | None) -> HistoryMark | None:
        return None

    def committed(self, origin: int, step: int, commit: Commit) -> None:
        pass

    def take_role(self, plan: Plan, leads: bool) -> None:
        pass

    def unwritten(self) -> Unwritten:
        return []

    def heard(self, records: list[tuple[int, StepRecord]]) -> None:
        pass
