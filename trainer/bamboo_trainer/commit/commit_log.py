"""The log of commits and of cells' reports, by step, and the policy for steps with NaN or infinity."""

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Final, Self

from bamboo_core.job.training_spec import NonFinite, Precision, TrainingSpec
from bamboo_core.planning.plan import Cell, Layout, WorkerId
from bamboo_trainer.commit.step_report import combined
from bamboo_trainer.frames import Commit, Commits, Ready
from bamboo_trainer.task import Task
from bamboo_trainer.training import TrainingConfig, loss_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPolicy:
    """The policy for steps whose loss or gradient is NaN or infinite: skip or apply them.

    skips: skip all such steps. scales: losses are scaled (fp16), so the scale alone may have made the gradient
    infinite. loss_unit: the number by which summed losses are divided before their backward.
    """

    skips: bool = False
    scales: bool = False
    loss_unit: float = 1.0

    @classmethod
    def of(cls, training: TrainingSpec, task: Task) -> Self:
        return cls(
            skips=training.non_finite is NonFinite.SKIP,
            scales=training.precision is Precision.FP16,
            loss_unit=loss_unit(task, TrainingConfig.of(training)),
        )

    def leaves_out(self, loss: float, norm: float) -> bool:
        """Return whether to skip a step with this loss and gradient norm.

        The loss scale cannot make a forward overflow, so `scales` alone skips only steps whose loss is finite.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            return False
        return self.skips or (self.scales and math.isfinite(loss))


APPLIES_ALL: Final = StepPolicy()


KEPT_STEPS = 3


class CommitLog:
    """A log of commits and cells' reports by step: the last few steps, and older ones that a state here still needs.

    newest: the newest known committed step; first_step - 1 before the first commit. end: the step of an early stop,
    once known.
    """

    def __init__(self, first_step: int, loss_unit: float = 1.0) -> None:
        """Create the log. first_step: the first step after the workers' initial states. loss_unit: see `StepPolicy`."""
        self.newest, self._loss_unit = first_step - 1, loss_unit
        self.commits: dict[int, Commit] = {}
        self.end: int | None = None
        self._generations: dict[int, int] = {}
        self._ready: dict[int, dict[Cell, tuple[Ready, set[WorkerId]]]] = {}  # with the workers that have reported it

    def ready(self, step: int, report: Ready, worker: WorkerId) -> None:
        """Record a worker's report of a cell's step unless the log has its commit. A cell's first report is kept."""
        if step not in self.commits:
            self._ready.setdefault(step, {}).setdefault(report.cell, (report, set()))[1].add(worker)

    def has_reported(self, step: int, cell: Cell, worker: WorkerId) -> bool:
        """Return whether the worker has reported the cell's step; False if the log has its commit."""
        reports = self._ready.get(step, {})
        return cell in reports and worker in reports[cell][1]

    def record(self, step: int, commit: Commit) -> None:
        self.commits[step] = commit
        self.newest = max(self.newest, step)
        self._generations[step + 1] = commit.generation
        self._ready.pop(step, None)
        if commit.early_stop:
            self.end = step

    def to_apply(self) -> Container[int]:
        """Return the steps with commits in this log, without the step of an early stop, which no state applies."""
        return self.commits if self.end is None else self.commits.keys() - {self.end}

    def generation(self, step: int) -> int | None:
        """Return the generation of the step's layout, known from a commit or another worker's state; else None."""
        return self._generations.get(step)

    def learn_generation(self, step: int, generation: int) -> None:
        self._generations.setdefault(step, generation)

    def forget(self, oldest_needed: int) -> None:
        """Forget the steps before `oldest_needed`, the oldest version held here. At least the last KEPT_STEPS stay."""
        limit = min(oldest_needed, self.newest - KEPT_STEPS)
        for table in (self.commits, self._ready, self._generations):
            for step in [k for k in table if k < limit]:
                del table[step]

    def latest(self) -> Commits:
        return sorted(self.commits.items())[-2:]

    def decide(self, step: int, stages: int, layout: Layout, generation: int, epoch: int) -> Commit | None:
        """Combine the reports of the layout's cells into the step's commit; return None if a report is missing."""
        reports = self._ready.get(step, {})
        cells = layout.cells(stages)
        if any(cell not in reports for cell in cells):
            return None
        return combined([reports[cell][0] for cell in cells], self._loss_unit, generation=generation, epoch=epoch)
