"""The log of committed steps, and of the reports that the root has received for the step in progress."""

from collections.abc import Container

from bamboo_core.planning.plan import Cell, Layout, WorkerId
from bamboo_trainer.commit.step_report import combined
from bamboo_trainer.frames.payloads import Commit, Commits, Ready

KEPT_STEPS = 3


class CommitLog:
    """Commits and ready reports by step: the last few, and older ones that a late replica still needs.

    newest: the newest known committed step; before the first commit, the step before the first. end: the step of an
    early stop, once known.
    """

    def __init__(self, first_step: int, loss_unit: float = 1.0) -> None:
        """Create the log. first_step: the first step after the workers' initial states. loss_unit: see `StepPolicy`."""
        self.newest, self._loss_unit = first_step - 1, loss_unit
        self.commits: dict[int, Commit] = {}
        self.end: int | None = None
        self._generations: dict[int, int] = {}
        self._ready: dict[int, dict[Cell, Ready]] = {}
        self._reporters: dict[int, set[tuple[Cell, WorkerId]]] = {}

    def ready(self, step: int, report: Ready, worker: WorkerId) -> None:
        """Record a cell's first report of a step; later ones are the same, sent again or by a repeating worker."""
        if step not in self.commits:
            self._ready.setdefault(step, {}).setdefault(report.cell, report)
            self._reporters.setdefault(step, set()).add((report.cell, worker))

    def has_reported(self, step: int, cell: Cell, worker: WorkerId) -> bool:
        """Return whether this worker has reported the cell's step, which is not committed yet."""
        return (cell, worker) in self._reporters.get(step, ())

    def record(self, step: int, commit: Commit) -> None:
        self.commits[step] = commit
        self.newest = max(self.newest, step)
        self._generations[step + 1] = commit.generation
        self._ready.pop(step, None)
        self._reporters.pop(step, None)
        if commit.early_stop:
            self.end = step

    def to_apply(self) -> Container[int]:
        """Return the steps that every state applies: all committed ones but the step of an early stop."""
        return self.commits if self.end is None else self.commits.keys() - {self.end}

    def generation(self, step: int) -> int | None:
        """Return the generation of the step's layout, known from a commit or another worker's state; else None."""
        return self._generations.get(step)

    def learn_generation(self, step: int, generation: int) -> None:
        self._generations.setdefault(step, generation)

    def forget(self, oldest_needed: int) -> None:
        """Forget commits older than the last few steps and than any state held here needs."""
        limit = min(oldest_needed, self.newest - KEPT_STEPS)
        for table in (self.commits, self._ready, self._reporters, self._generations):
            for step in [k for k in table if k < limit]:
                del table[step]

    def latest(self) -> Commits:
        return sorted(self.commits.items())[-2:]

    def decide(self, step: int, stages: int, layout: Layout, generation: int, epoch: int) -> Commit | None:
        """Return the commit of a step once every cell of its layout has reported; equal on every worker."""
        reports = self._ready.get(step, {})
        cells = layout.cells(stages)
        if any(cell not in reports for cell in cells):
            return None
        result = combined([reports[cell] for cell in cells], self._loss_unit)
        return Commit(
            norm=result.norm,
            loss=result.loss,
            scale=result.scale,
            metrics=result.metrics,
            evaluation=result.evaluation,
            microbatches=result.microbatches,
            generation=generation,
            epoch=epoch,
        )
