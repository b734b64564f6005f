"""Which steps are committed, and what the root has heard of the step in progress."""

import math
from collections.abc import Mapping, Sequence

from bamboo.planning.plan import Cell, Layout
from bamboo_trainer.commit.exact_sum import quotient
from bamboo_trainer.transport.payloads import Commit, Commits, Ready

KEPT_STEPS = 3


def _evaluation(reports: Sequence[Mapping[str, tuple[Sequence[float], Sequence[float]]]]) -> dict[str, float]:
    """By metric, of all who have evaluated batches."""
    return {
        name: quotient(
            [term for one in reports if name in one for term in one[name][0]],
            [term for one in reports if name in one for term in one[name][1]],
        )
        for name in sorted({name for one in reports for name in one})
    }


def _mean(losses: list[float]) -> float:
    """Exactly rounded, so their order does not matter; NaN if one of them is no finite number."""
    if not all(map(math.isfinite, losses)):
        return math.nan  # fsum raises if infinities of both signs are among them
    return math.fsum(losses) / max(1, len(losses))


class CommitLog:
    """Commits and ready reports by step; remembers the last few, and those that a late replica still needs."""

    def __init__(self, first_step: int) -> None:
        """first_step: of the states that the workers began with."""
        self._first_step = first_step
        self.commits: dict[int, Commit] = {}
        self._generations: dict[int, int] = {}
        self._ready: dict[int, dict[Cell, Ready]] = {}

    @property
    def newest(self) -> int:
        """The newest committed step that is known; if none is, the one before the first."""
        return max(self.commits, default=self._first_step - 1)

    def ready(self, step: int, report: Ready) -> None:
        """The first report of a cell counts: a later one is the same, sent again."""
        if step not in self.commits:
            self._ready.setdefault(step, {}).setdefault(report.cell, report)

    def record(self, step: int, commit: Commit) -> None:
        self.commits[step] = commit
        self._generations[step + 1] = commit.generation
        self._ready.pop(step, None)

    def generation(self, step: int) -> int | None:
        """Of the step's layout, if a commit or another worker's state has told."""
        return self._generations.get(step)

    def learn_generation(self, step: int, generation: int) -> None:
        self._generations.setdefault(step, generation)

    def forget(self, oldest_needed: int) -> None:
        """Forget commits that no state held here, nor the last few steps, still need."""
        limit = min(oldest_needed, self.newest - KEPT_STEPS)
        for table in (self.commits, self._ready, self._generations):
            for step in [k for k in table if k < limit]:
                del table[step]

    def latest(self) -> Commits:
        return sorted(self.commits.items())[-2:]

    def decide(self, step: int, stages: int, layout: Layout, generation: int, epoch: int) -> Commit | None:
        """The commit of a step, once every cell of its layout has reported; always the same, whoever asks."""
        reports = self._ready.get(step, {})
        cells = [Cell(d, s) for d in range(layout.pipelines) for s in range(stages)]
        if any(cell not in reports for cell in cells):
            return None
        norm = math.sqrt(math.fsum(term for s in range(stages) for term in reports[Cell(0, s)].squared_norm))
        last = [reports[cell].evaluation for cell in cells if cell.stage == stages - 1]
        losses = {m: loss for cell in cells for m, loss in reports[cell].losses.items()}
        loss = _mean(list(losses.values()))
        return Commit(
            norm=norm, loss=loss, microbatches=len(losses), generation=generation, epoch=epoch,
            evaluation=_evaluation(last),
        )  # fmt: skip
