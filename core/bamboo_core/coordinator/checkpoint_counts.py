"""What became of a job's checkpoints since its coordinator was made, as metrics and summaries have it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from bamboo_core.coordinator.distribution import Distribution
from bamboo_core.coordinator.replacing import replace

DURATIONS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)  # seconds
STALLS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds
_NO_DURATIONS: Final = Distribution.empty(DURATIONS)
_NO_STALLS: Final = Distribution.empty(STALLS)


class AbandonReason(StrEnum):
    """Why a checkpoint is given up."""

    WRITER_LOST = "WriterLost"  # before all parts were durable
    STORE_FAILED = "StoreFailed"  # a worker could not write its part or the manifest
    TOO_SLOW = "TooSlow"
    TOO_LATE = "TooLate"  # the root heard of it after the last step
    WENT_BACK = "WentBack"  # the job itself has gone back to an older one


class RestoreCause(StrEnum):
    """Why a job goes back to a checkpoint; the reason of its end if there is none."""

    STAGE_LOST = "StageLost"
    WORKERS_GONE = "WorkersGone"
    RESULTS_DIFFER = "ResultsDiffer"  # of which one is wrong
    SUSPENDED = "Suspended"  # the newest steps were not kept, or lost before; this coordinator does not know more


class RestoreProblem(StrEnum):
    """Why a worker could not begin with a checkpoint."""

    DAMAGED = "Damaged"
    UNREADABLE = "Unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCounts:
    """durations: of those that were saved, from the commit of their step until the manifest was there. stalls: for
    which training waited, the longest of any worker. bytes: of all parts that were durable, whatever became of them.

    repeated: steps that were committed before the job went back behind them; repeated_seconds: that they usually take.
    """

    durations: Distribution = _NO_DURATIONS
    stalls: Distribution = _NO_STALLS
    bytes: int = 0
    abandoned: Mapping[AbandonReason, int] = field(default_factory=dict)
    restores: Mapping[RestoreCause, int] = field(default_factory=dict)
    problems: Mapping[RestoreProblem, int] = field(default_factory=dict)
    repeated: int = 0
    repeated_seconds: float = 0.0

    def saved(self, seconds: float, stall: float) -> "CheckpointCounts":
        return replace(self, durations=self.durations.having(seconds), stalls=self.stalls.having(stall))

    def abandoning(self, reason: AbandonReason) -> "CheckpointCounts":
        return replace(self, abandoned={**self.abandoned, reason: self.abandoned.get(reason, 0) + 1})

    def restoring(self, cause: RestoreCause) -> "CheckpointCounts":
        return replace(self, restores={**self.restores, cause: self.restores.get(cause, 0) + 1})

    def unusable(self, problem: RestoreProblem) -> "CheckpointCounts":
        return replace(self, problems={**self.problems, problem: self.problems.get(problem, 0) + 1})

    def repeating(self, steps: int, step_seconds: float) -> "CheckpointCounts":
        seconds = self.repeated_seconds + steps * step_seconds
        return replace(self, repeated=self.repeated + steps, repeated_seconds=seconds)
