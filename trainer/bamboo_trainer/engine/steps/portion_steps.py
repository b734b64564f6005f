"""The portions of cells that this worker runs beside its own: see `bamboo_core.planning.portions`."""

from bamboo_core.planning.plan import ROOT, Cell
from bamboo_core.planning.portions import Range, ranges
from bamboo_trainer.commit.committer import Committer
from bamboo_trainer.engine.steps.cell_step import CellStep
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.stage_states import StageStates


class PortionSteps:
    """steps: by cell and microbatches. What is begun is gone on with as long as the plan leaves it to this worker."""

    def __init__(self, plan: PlanState, states: StageStates, committer: Committer) -> None:
        """committer: knows the layout of a step."""
        self._plan, self._states, self._committer = plan, states, committer
        self.steps: dict[tuple[Cell, Range], CellStep] = {}

    def refresh(self, before: int) -> None:
        """The plan in force or the version of the stage is new. before: the first step that is none of the job's."""
        plan, stage = self._plan.current, self._states.stage(ROOT.stage)
        layout = self._committer.layout(stage.values.version) if stage and stage.values.version < before else None
        old, self.steps = self.steps, {}
        if stage is None or layout is None:
            return
        for cell in plan.cells():
            portions = plan.at(cell).portions
            if not portions or cell.pipeline >= layout.pipelines:
                continue
            for worker, microbatches in ranges(layout, cell.pipeline, portions):
                if worker == self._plan.worker:
                    known = old.get((cell, microbatches))
                    goes_on = known is not None and (known.step, known.layout) == (stage.values.version, layout)
                    new = None if goes_on else CellStep.of_portion(cell, layout, microbatches, stage)
                    self.steps[cell, microbatches] = new or old[cell, microbatches]
