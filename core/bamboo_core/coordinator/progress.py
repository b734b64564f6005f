"""Progress of a job: its committed steps, losses, evaluations and step times."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from bamboo_core.control import protocol
from bamboo_core.coordinator.replacing import Record, replace

KEPT_LOSSES: Final = 2000
KEPT_DURATIONS: Final = 200  # steps
USUAL_OF: Final = 20  # steps whose median duration is the usual one
MOST_SECONDS: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierProgress:
    """Progress under earlier coordinators. step: number of committed steps. step_seconds: usual duration of a step."""

    step: int = 0
    step_seconds: float | None = None


BEGINNING: Final = EarlierProgress()


@dataclass(frozen=True, kw_only=True)  # without slots, for a fast `replace`
class Progress(Record):
    """The job's progress: its committed steps, with their losses, metrics and durations, and its evaluations.

    step: known number of committed steps. furthest: steps below it do not count as new, such as steps repeated from a
    checkpoint. counting: set once this coordinator knows from which step it counts; trained: number of new steps since
    then. generation: that of the newest step's layout; -1: no step is known since the workers last began anew.

    losses, evaluations: the newest ones, by step. skips: the newest steps that left the model as it was, in order.
    lost_by_step: number of missing microbatches, by step; the oldest entries are merged. skipped_steps,
    lost_microbatches: totals over new steps, which going back does not reduce. gradient_norm, learning_rate, metrics:
    of the newest step. step_seconds: durations of the newest timed steps, oldest first.

    last_at: the time in seconds from which lack of progress counts: of the last new step, evaluation or new beginning.
    hinted: the later of last_at and the phase's beginning when NoProgress was last reported; None: never.
    """

    step: int = 0
    furthest: int = 0
    counting: bool = False
    trained: int = 0
    earlier: EarlierProgress = BEGINNING
    generation: int = -1
    first_loss: float | None = None
    losses: Mapping[int, float] = field(default_factory=dict)
    evaluations: Mapping[int, Mapping[str, float | None]] = field(default_factory=dict)
    skips: tuple[int, ...] = ()
    skipped_steps: int = 0
    gradient_norm: float | None = None
    learning_rate: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    lost_microbatches: int = 0
    lost_by_step: Mapping[int, int] = field(default_factory=dict)
    step_seconds: tuple[float, ...] = ()
    last_at: float = 0.0
    hinted: float | None = None

    @property
    def usual_step(self) -> float | None:
        """Return the median seconds of the recent steps; None until one is timed."""
        return median(self.step_seconds[-USUAL_OF:]) if self.step_seconds else None

    def has_heard_of(self, step: int) -> bool:
        """Return whether the coordinator already knows the result of a step, or the step is too old to matter."""
        return step in self.losses or step in self.skips or step < self.step - KEPT_LOSSES

    def skips_before(self, step: int) -> int:
        """Return how many consecutive steps were skipped up to and including `step`, itself a skipped step."""
        return next((n for n in range(1, len(self.skips) + 1) if step - n not in self.skips), len(self.skips))

    def with_loss(self, step: int, loss: float) -> "Progress":
        losses = {**self.losses, step: loss}
        if len(losses) > KEPT_LOSSES:
            del losses[min(losses)]
        first = loss if step == 0 or self.first_loss is None else self.first_loss
        return replace(self, losses=losses, first_loss=first)

    def skipping(self, step: int) -> "Progress":
        """Record a step that left the model unchanged. Count it if `counting` is set and it is new (`furthest`)."""
        skips = tuple(sorted({*self.skips, step}))[-KEPT_LOSSES:]
        new = self.counting and step >= max(self.step, self.furthest)
        return replace(self, skips=skips, skipped_steps=self.skipped_steps + new)

    def counting_step(self, step: int, lost: int) -> "Progress":
        """Count a committed step, and unreported ones before it, as far as they are new (see `furthest`). The first
        step that a restarted coordinator hears of is not counted. lost: number of the step's missing microbatches.
        """
        before = max(self.step, self.furthest) if self.counting else step + 1
        new = max(0, step + 1 - before)
        counted = replace(self, counting=True, furthest=max(before, step + 1), trained=self.trained + new)
        if not lost:
            return counted
        by_step = {**self.lost_by_step, step: lost}
        if len(by_step) > KEPT_LOSSES:
            oldest, next_one = sorted(by_step)[:2]
            by_step[next_one] += by_step.pop(oldest)
        return replace(counted, lost_by_step=by_step, lost_microbatches=self.lost_microbatches + (lost if new else 0))

    def committed(self, message: protocol.StepCommitted, now: float) -> "Progress":
        """Record the newest committed step and its figures."""
        seconds = self.step_seconds
        if 0 < message.seconds <= MOST_SECONDS:
            seconds = (*seconds, message.seconds)[-KEPT_DURATIONS:]
        return replace(
            self,
            step=message.step + 1,
            generation=message.generation,
            last_at=now,
            gradient_norm=message.gradient_norm,
            learning_rate=message.learning_rate,
            metrics=message.metrics,
            step_seconds=seconds,
        )

    def evaluated(self, step: int, found: Mapping[str, float | None], now: float) -> "Progress":
        """Record the evaluation of the state after `step` steps. found: values by metric."""
        known = dict(sorted({**self.evaluations, step: found}.items())[-KEPT_LOSSES:])
        return replace(self, evaluations=known, last_at=now)

    def back_at(self, step: int, now: float) -> "Progress":
        """Go back to the state after `step` steps: drop later losses, missing microbatches, skips and metrics."""
        return replace(
            self,
            step=step,
            generation=-1,
            losses={k: loss for k, loss in self.losses.items() if k < step},
            lost_by_step={k: lost for k, lost in self.lost_by_step.items() if k < step},
            skips=tuple(k for k in self.skips if k < step),
            gradient_norm=None,
            learning_rate=None,
            metrics={},
            last_at=now,
        )
