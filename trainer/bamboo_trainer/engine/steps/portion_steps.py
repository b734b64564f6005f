"""The portions of cells that this worker runs beside its own: see `bamboo_core.planning.portions`."""

from collections.abc import Callable, Mapping

from bamboo_core.planning.plan import Cell, Layout
from bamboo_core.planning.portions import Range, keeper, ranges
from bamboo_trainer.commit.committer import Committer
from bamboo_trainer.engine.steps.cell_step import CellStep, Shadow
from bamboo_trainer.engine.steps.frame_fit import check_fit
from bamboo_trainer.engine.steps.kept_sums import KeptSums
from bamboo_trainer.frames.frame import Address, Frame
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.stage_states import StageStates


class PortionSteps:
    """steps: by cell and microbatches. What is begun is gone on with as long as the plan leaves it to this worker.

    Of a portion whose first sums are kept here only the rest is run, if the stages beside the cell have all that came
    of them: nobody could send it again. If one of those stages changes hands, the whole portion is run.
    """

    def __init__(
        self,
        plan: PlanState,
        states: StageStates,
        committer: Committer,
        shadows: Callable[[], Mapping[Cell, Shadow]],
        passed_on: Callable[[Cell, int], int],
    ) -> None:
        """committer: knows the layout of a step. shadows: what has been computed of cells in advance. passed_on: before
        which microbatch the stages beside a cell have all that came of it in a step.
        """
        self._plan, self._states, self._committer, self._shadows = plan, states, committer, shadows
        self._passed_on = passed_on
        self.kept = KeptSums()
        self.steps: dict[tuple[Cell, Range], CellStep] = {}
        self._resumed: dict[tuple[Cell, Range], object] = {}  # of those that are not run whole, who is beside the cell
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
                    key = (cell, microbatches)
                    self.steps[key] = self._step(key, old.get(key), layout, stage)
        early, self._early = self._early, {}
        return list(early.values())

    def _step(self, key: tuple[Cell, Range], known: CellStep | None, layout: Layout, stage: Stage) -> CellStep:
        """Return the step of a portion as it was, if it may be gone on with, or else from its begin."""
        (cell, (first, end)), step, beside = key, stage.values.version, self._beside(key[0])
        if known is not None and (known.step, known.layout) == (step, layout):
            if self._resumed.get(key, beside) == beside:
                return known
            kept = []
        else:
            kept = self.kept.of(cell, step, (first, min(end, self._passed_on(cell, step))))
        self._resumed.pop(key, None)
        if kept:
            self._resumed[key] = beside
        found = CellStep.of_portion(cell, self._plan.stages, layout, (first, end), stage, kept)
        if cell in self._shadows():
            found.adopt(self._shadows()[cell])
        return found

    def elsewhere(self, owned: CellStep) -> int:
        """Return how many of a shared cell's microbatches others run."""
        assert owned.layout is not None
        shared = ranges(owned.layout, owned.cell.pipeline, owned.portions)
        return sum(end - first for worker, (first, end) in shared if worker != self._plan.worker)

    def _beside(self, cell: Cell) -> object:
        """Who runs the stages before the cell and behind it."""
        plan, (d, s) = self._plan.current, cell
        around = (plan.at(Cell(d, other)) for other in (s - 1, s + 1) if 0 <= other < self._plan.stages)
        return [(assignment.owner, assignment.portions) for assignment in around]

    def keep(self, frame: Frame) -> bool:
        """Keep the sum of finished groups of a cell that this worker would go on with. False if it would not, or does
        not have the stage yet. Raises RefusedFrame.
        """
        address, plan = frame.address, self._plan.current
        stage, layout = self._states.stage(address.stage), self._committer.layout(address.step)
        if not plan.has(address.cell) or keeper(plan, address.cell) != self._plan.worker or not (stage and layout):
            return False
        if address.step > self._committer.log.newest:
            check_fit(frame, stage.values.final, layout)
            self.kept.keep(frame)
        return True

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
