"""Spot checks for wrong results: which stage's microbatch is recomputed, when, and by which worker. Pure. See
docs/design/determinism.md. Intervals are primes, so that checks also find a fault that recurs at every tenth call.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from bamboo_core.planning.plan import Cell, Layout, Plan, WorkerId

EARLY: Final = (0, 5, 11, 19, 29, 37)  # the numbers of committed steps at which every stage is checked
INTERVALS: Final = (17, 37, 67, 127, 251)  # steps between two later checks of a stage
MICROBATCHES: Final = 250  # run by a pipeline, at least, for each recomputed one


@dataclass(frozen=True, slots=True)
class SpotSchedule:
    """The steps in which stages are checked."""

    early: Collection[int] = EARLY  # steps in which every stage is checked, before the intervals apply

    def interval(self, layout: Layout) -> int:
        """Return the number of steps between two checks of a stage: more if pipelines run few microbatches per step."""
        fewest = min(map(len, layout.split))
        return next((steps for steps in INTERVALS if steps * fewest >= MICROBATCHES), INTERVALS[-1])

    def checks(self, cell: Cell, stages: int, layout: Layout, step: int) -> bool:
        """Return whether a microbatch of the cell is to be recomputed in this step.

        A stage's pipelines take turns. After the early steps, the checks of the stages are spread over an interval.
        """
        if cell.pipeline != (step + cell.stage) % layout.pipelines:
            return False
        if step in self.early:
            return True
        interval = self.interval(layout)
        return step > max(self.early, default=-1) and (step + cell.stage * interval // stages) % interval == 0


def checker(plan: Plan, cell: Cell) -> WorkerId:
    """Return the worker that recomputes a cell's microbatch: another holder of the stage's state; the owner if none is
    left. Order of preference: workers that own no cell, replicas of the cell, owners in other pipelines.
    """
    owner, pipelines = plan.at(cell).owner, len(plan.pipelines)
    same = [Cell((cell.pipeline + d) % pipelines, cell.stage) for d in range(pipelines)]
    replicas = [worker for other in same for worker in plan.at(other).replicas]
    others = [*plan.at(cell).replicas, *(plan.at(other).owner for other in same), *replicas]
    running = {plan.at(other).owner for other in plan.cells()}
    candidates = [worker for worker in others if worker != owner]
    return min(candidates, key=lambda worker: worker in running, default=owner)
