"""The coordinator's record of the job's end: why it ends and which cells have finished."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bamboo_core.coordinator.replacing import replace
from bamboo_core.planning.plan import Cell, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """An early end of the job, which takes effect once a state of `step` steps or more is kept.

    since: when it was requested. unheard: workers have to reconnect to a restarted coordinator first.
    """

    reason: str
    message: str
    step: int
    since: float
    unheard: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of the job.

    stopping: the job ends before its last step. finished: cells with their last state, with its digest. finishers: the
    worker that reported each cell last.
    """

    stopping: Stopping | None = None
    finished: tuple[tuple[Cell, str], ...] = ()
    finishers: Mapping[Cell, WorkerId] = field(default_factory=dict)

    def with_finished(self, cell: Cell, digest: str, worker: WorkerId) -> "Ending":
        finished = {**dict(self.finished), cell: digest}
        return replace(self, finished=tuple(sorted(finished.items())), finishers={**self.finishers, cell: worker})
