"""Counts of a job's checkpoints and restores since its coordinator was created, for metrics and summaries."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from bamboo_core.coordinator.replacing import replace


@dataclass(frozen=True, slots=True)
class Distribution:
    """Counts of values between bounds.

    bounds: upper bounds, ascending. counts: number of values up to each bound, and of those above the last. total: the
    sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> "Distribution":
        return cls(bounds, (0,) * (len(bounds) + 1))

    @property
    def count(self) -> int:
        return sum(self.counts)

    def having(self, value: float) -> "Distribution":
        """Return the distribution with one more value."""
        place = bisect_left(self.bounds, value)
        counts = (*self.counts[:place], self.counts[place] + 1, *self.counts[place + 1 :])
        return replace(self, counts=counts, total=self.total + value)


DURATIONS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)  # seconds
STALLS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds
_NO_DURATIONS: Final = Distribution.empty(DURATIONS)
_NO_STALLS: Final = Distribution.empty(STALLS)


class AbandonReason(StrEnum):
    """The reason why the coordinator abandons a checkpoint."""

    WRITER_LOST = "WriterLost"  # before all parts were durable
    STORE_FAILED = "StoreFailed"  # a worker could not write its part or the manifest
    TOO_SLOW = "TooSlow"
    TOO_LATE = "TooLate"  # the root heard of it after the last step
    WENT_BACK = "WentBack"  # the job itself has gone back to an older one


class RestoreCause(StrEnum):
    """The cause for which a job goes back to a checkpoint; also the reason of its end if it has no checkpoint."""

    STAGE_LOST = "StageLost"
    WORKERS_GONE = "WorkersGone"
    RESULTS_DIFFER = "ResultsDiffer"  # two workers computed different results, and one of them is wrong
    SUSPENDED = "Suspended"  # the newest steps were not kept, or were lost before this coordinator existed


class RestoreProblem(StrEnum):
    """The reason why a worker could not start from a checkpoint."""

    DAMAGED = "Damaged"
    UNREADABLE = "Unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCounts:
    """Counts and durations of a job's checkpoints and restores.

    durations: seconds from the commit of a checkpoint's step until its manifest was written, of saved checkpoints.
    stalls: seconds for which training waited for a checkpoint, the longest of any worker. bytes: size of all durable
    parts, whether or not their checkpoint was completed. repeated: steps committed before the job went back behind
    them; repeated_seconds: the time that these steps usually take.
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
