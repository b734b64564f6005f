"""Cells that move from one worker to another, and the takeovers that result."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from bamboo_core.control import protocol
from bamboo_core.coordinator.events import Takeover
from bamboo_core.coordinator.progress import MOST_SECONDS
from bamboo_core.coordinator.replacing import replace
from bamboo_core.planning.plan import Cell, WorkerId

REPORT_STEPS: Final = 4  # after these and REPORT_SECONDS a missing report of a takeover counts as lost
REPORT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A plan that moves cells, until every new owner has reported.

    victims: the cells and their previous owners. step: number of committed steps. announced: an owner was lost or is
    under notice; other moves are not shown to users.
    """

    epoch: int
    lost_at: float
    decided_at: float
    step: int
    notice: bool
    announced: bool
    victims: tuple[tuple[Cell, WorkerId], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Moves of cells in progress (recoveries) and finished takeovers."""

    recoveries: tuple[Recovery, ...] = ()
    takeovers: tuple[Takeover, ...] = ()

    def without(self, cells: Set[Cell], epoch: int) -> "Moves":
        """End the moves of these cells up to the plan of this epoch."""
        left = []
        for recovery in self.recoveries:
            over = cells if recovery.epoch <= epoch else frozenset[Cell]()
            victims = tuple((cell, victim) for cell, victim in recovery.victims if cell not in over)
            if victims:
                left.append(replace(recovery, victims=victims))
        return replace(self, recoveries=tuple(left))

    def taken_over(self, worker: WorkerId, message: protocol.TakenOver) -> "Moves":
        """Record that a cell's new owner has caught up; earlier intended owners will not report.

        If the cell moved on before an announced takeover was over, this report ends that takeover.
        """
        cell = message.cell
        moves = [r for r in self.recoveries if r.epoch <= message.epoch and cell in dict(r.victims)]
        left = self.without({cell}, message.epoch)
        recovery = next((r for r in reversed(moves) if r.announced), None)
        if recovery is None:
            return left
        taken = Takeover(
            epoch=moves[-1].epoch,
            victim=dict(recovery.victims)[cell],
            worker=worker,
            pipeline=cell.pipeline,
            stage=cell.stage,
            step=message.step + 1,
            notice=recovery.notice,
            decide_ms=(recovery.decided_at - recovery.lost_at) * 1e3,
            reform_ms=_milliseconds(message.reform_ms),
            recompute_ms=_milliseconds(message.recompute_ms),
            forwards=message.forwards,
            backwards=message.backwards,
        )
        return replace(left, takeovers=(*self.takeovers, taken))

    def without_unreported(self, step: int, now: float) -> "Moves":
        """Drop moves whose report was lost with its channel; the cell has moved nevertheless."""
        recoveries = tuple(
            r for r in self.recoveries if step < r.step + REPORT_STEPS or now < r.decided_at + REPORT_SECONDS
        )
        return replace(self, recoveries=recoveries)


def _milliseconds(value: float) -> float:
    return min(max(0.0, value), 1e3 * MOST_SECONDS)
