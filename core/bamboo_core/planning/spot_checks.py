"""Which microbatch of which stage is computed again, when, and by whom: a pure function of step, plan and layout.

See docs/design/determinism.md. The steps are no multiples of anything, so that what happens in every tenth call is met,
too.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from bamboo_core.planning.plan import Cell, Layout, Plan, WorkerId

EARLY: Final = (5, 11, 19, 29, 37)  # so many steps are committed when every stage is checked
INTERVALS: Final = (17, 31, 61, 127, 251)  # steps between two checks of a stage, later
MICROBATCHES: Final = 240  # of a pipeline, at least, for each that is computed again


@dataclass(frozen=True, slots=True)
class SpotSchedule:
    """The steps in which stages are checked."""

    early: Collection[int] = EARLY  # steps in which every stage is checked, before each is at its interval

    def interval(self, layout: Layout) -> int:
        """Steps within which each stage is checked once: the fewer microbatches a step has, the more."""
        fewest = min(map(len, layout.split))
        return next((steps for steps in INTERVALS if steps * fewest >= MICROBATCHES), INTERVALS[-1])

    def checks(self, cell: Cell, stages: int, layout: Layout, step: int) -> bool:
        """Is a microbatch of that cell computed again in that step? Of a stage's pipelines it is another one each time,
        and the stages are not checked in the same step.
        """
        if cell.pipeline != (step + cell.stage) % layout.pipelines:
            return False
        if step in self.early:
            return True
        interval = self.interval(layout)
        return step > max(self.early, default=-1) and (step + cell.stage * interval // stages) % interval == 0


def checker(plan: Plan, cell: Cell) -> WorkerId:
    """Who computes it again: another worker that has the stage's state, and at best runs nothing; the next one is the
    shadow. Without one it is the owner.
    """
    owner, pipelines = plan.at(cell).owner, len(plan.pipelines)
    same = [Cell((cell.pipeline + d) % pipelines, cell.stage) for d in range(pipelines)]
    replicas = [worker for other in same for worker in plan.at(other).replicas]
    others = [*plan.at(cell).replicas, *(plan.at(other).owner for other in same), *replicas]
    running = {plan.at(other).owner for other in plan.cells()}
    candidates = [worker for worker in others if worker != owner]
    return min(candidates, key=lambda worker: worker in running, default=owner)
