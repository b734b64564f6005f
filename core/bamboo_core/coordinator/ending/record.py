"""What a coordinator knows of the job's end: why it is to come and who has finished."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bamboo_core.coordinator.replacing import replace
from bamboo_core.planning.plan import Cell, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """How the job is to end as soon as a state of that many steps or more is kept.

    since: when that was said. unheard: workers have to come back to a restarted coordinator before.
    """

    reason: str
    message: str
    step: int
    since: float
    unheard: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """stopping: the job is to end before its last step. finished: cells whose last state is there, with its digest;
    finishers: who said so last of each.
    """

    stopping: Stopping | None = None
    finished: tuple[tuple[Cell, str], ...] = ()
    finishers: Mapping[Cell, WorkerId] = field(default_factory=dict)

    def with_finished(self, cell: Cell, digest: str, worker: WorkerId) -> "Ending":
        finished = {**dict(self.finished), cell: digest}
        return replace(self, finished=tuple(sorted(finished.items())), finishers={**self.finishers, cell: worker})
