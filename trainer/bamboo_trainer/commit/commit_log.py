"""Which steps are committed, and what the root has heard of the step in progress."""

import math

import msgspec

from bamboo.plan import Cell, Layout

KEPT_STEPS = 3


class Ready(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cell has finished a step: its gradient's squared norm, and the losses if it is a last stage."""

    norm_squared: float
    losses: dict[int, float]


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The root's word on a step. generation: the next step's layout; epoch: the plan in force from then on.

    microbatches: how many the loss is the mean of.
    """

    norm: float
    loss: float
    microbatches: int
    generation: int
    epoch: int


class Ledger:
    """Commits and ready reports by step; remembers the last few, and those that a late replica still needs."""

    def __init__(self) -> None:
        self.commits: dict[int, Commit] = {}
        self.generations: dict[int, int] = {}
        self._ready: dict[int, dict[Cell, Ready]] = {}

    @property
    def newest(self) -> int:
        """The newest committed step that is known; -1 if none is."""
        return max(self.commits, default=-1)

    def ready(self, step: int, cell: Cell, report: Ready) -> None:
        if step not in self.commits:
            self._ready.setdefault(step, {}).setdefault(cell, report)

    def record(self, step: int, commit: Commit) -> bool:
        """True if it is news."""
        if step in self.commits:
            return False
        self.commits[step] = commit
        self.generations[step + 1] = commit.generation
        self._ready.pop(step, None)
        return True

    def forget(self, oldest_needed: int) -> None:
        """Forget commits that no state held here, nor the last few steps, still need."""
        limit = min(oldest_needed, self.newest - KEPT_STEPS)
        for table in (self.commits, self._ready, self.generations):
            for step in [k for k in table if k < limit]:
                del table[step]

    def latest(self) -> list[tuple[int, Commit]]:
        return sorted(self.commits.items())[-2:]

    def decide(self, step: int, stages: int, layout: Layout, generation: int, epoch: int) -> Commit | None:
        """The commit of a step, once every cell of its layout has reported; always the same, whoever asks."""
        reports = self._ready.get(step, {})
        cells = [Cell(d, s) for d in range(layout.pipelines) for s in range(stages)]
        if any(cell not in reports for cell in cells):
            return None
        norm = math.sqrt(sum(reports[Cell(0, s)].norm_squared for s in range(stages)))
        losses = {m: loss for cell in cells for m, loss in reports[cell].losses.items()}
        loss = math.fsum(losses[m] for m in sorted(losses)) / len(losses)
        return Commit(norm=norm, loss=loss, microbatches=len(losses), generation=generation, epoch=epoch)
