"""The portions of cells that this worker runs beside its own: see `bamboo_core.planning.portions`."""

from collections.abc import Callable, Mapping

from bamboo_core.planning.plan import Cell
from bamboo_core.planning.portions import Range, ranges
from bamboo_trainer.commit.committer import Committer
from bamboo_trainer.engine.steps.cell_step import CellStep, Shadow
from bamboo_trainer.frames.frame import Address, Frame
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.stage_states import StageStates


class PortionSteps:
    """steps: by cell and microbatches. What is begun is gone on with as long as the plan leaves it to this worker."""

    def __init__(
        self, plan: PlanState, states: StageStates, committer: Committer, shadows: Callable[[], Mapping[Cell, Shadow]]
    ) -> None:
        """committer: knows the layout of a step. shadows: what has been computed of cells in advance."""
        self._plan, self._states, self._committer, self._shadows = plan, states, committer, shadows
        self.steps: dict[tuple[Cell, Range], CellStep] = {}
        self._early: dict[Address, Frame] = {}  # boundary tensors of portions that have not begun

    def refresh(self, before: int) -> list[Frame]:
        """The plan in force or the version of a stage is new. before: the first step that is none of the job's.

        Returns what was kept of boundary tensors, for whoever runs their microbatches now.
        """
        plan = self._plan.current
        old, self.steps = self.steps, {}
        for cell in plan.cells():
            portions, stage = plan.at(cell).portions, self._states.stage(cell.stage)
            if not portions or stage is None or stage.values.version >= before:
                continue
            layout = self._committer.layout(stage.values.version)
            if layout is None or cell.pipeline >= layout.pipelines:
                continue
            for worker, microbatches in ranges(layout, cell.pipeline, portions):
                if worker == self._plan.worker:
                    known = old.get((cell, microbatches))
                    if known is None or (known.step, known.layout) != (stage.values.version, layout):
                        known = CellStep.of_portion(cell, self._plan.stages, layout, microbatches, stage)
                        if cell in self._shadows():
                            known.adopt(self._shadows()[cell])
                    self.steps[cell, microbatches] = known
        early, self._early = self._early, {}
        return list(early.values())

    def accept(self, frame: Frame) -> bool:
        """Keep a boundary tensor, if this worker runs that microbatch of the cell. Raises RefusedFrame."""
        address, stage = frame.address, self._states.stage(frame.address.stage)
        shared = any(portion.worker == self._plan.worker for portion in self._plan.current.at(address.cell).portions)
        if not shared or stage is None or address.step <= self._committer.log.newest:
            return False
        if address.step > stage.values.version:
            self._early[address] = frame
            return True
        for (cell, (first, end)), one in self.steps.items():
            if cell == address.cell and first <= address.microbatch < end:
                one.accept(frame, stage)
                return True
        return False
