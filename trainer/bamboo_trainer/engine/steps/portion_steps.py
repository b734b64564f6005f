"""The portions of cells that this worker runs beside its own: see `bamboo_core.planning.portions`."""

from collections.abc import Collection

from bamboo_core.planning.plan import Cell, Layout, Plan
from bamboo_core.planning.portions import Range, keeper, kept_by, ranges
from bamboo_trainer.commit.committer import Committer
from bamboo_trainer.engine.steps.cell_step import CellStep
from bamboo_trainer.engine.steps.frame_fit import check_sum
from bamboo_trainer.engine.steps.kept_sums import KeptSums
from bamboo_trainer.frames.frame import Address, Frame
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.stage_states import StageStates


class PortionSteps:
    """steps: by cell and microbatches. What is begun is gone on with as long as the plan leaves it to this worker.

    A lost cell's new owner waits for the sums that its keeper gives it, and runs the rest alone: what came of these
    groups is where it is needed, though nobody could send it again. If a stage beside the cell changes hands, the whole
    portion is run.
    """

    def __init__(self, plan: PlanState, states: StageStates, committer: Committer) -> None:
        """committer: knows the layout of a step."""
        self._plan, self._states, self._committer = plan, states, committer
        self.kept = KeptSums()
        self.steps: dict[tuple[Cell, Range], CellStep] = {}
        self._awaited: dict[Cell, int] = {}  # cells of which a keeper gives this worker its sums; in which step
        self._given: dict[Cell, int] = {}  # those of which it has, likewise
        self._resumed: dict[tuple[Cell, Range], object] = {}  # of those that are not run whole, who is beside the cell
        self._early: dict[Address, Frame] = {}  # boundary tensors of portions that have not begun

    def await_kept(self, old: Plan | None, changed: Collection[Cell]) -> None:
        """Wait for the sums of cells that this worker owns from now on. changed: cells that a plan in the middle of a
        step has given to others. old: the plan before it.
        """
        plan = self._plan.current
        beside = {Cell(d, s + way) for d, s in changed for way in (-1, 1)}
        for cell in {*self._awaited, *self._given} if plan.boundary else beside:
            self._awaited.pop(cell, None)
            self._given.pop(cell, None)
        for cell in set(changed) - beside:
            stage, is_mine = self._states.stage(cell.stage), self._plan.owner(cell) == self._plan.worker
            if is_mine and plan.at(cell).portions and stage and old and kept_by(old, self._plan.owner, cell):
                self._awaited[cell] = stage.values.version

    def kept_all(self, address: Address) -> bool:
        """A cell's keeper has given all that it has kept. False if nothing waits for that."""
        if self._awaited.pop(address.cell, None) is None:
            return False
        self._given[address.cell] = address.step
        return True

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
            awaited = layout.split[cell.pipeline][0] if self._awaited.get(cell) == stage.values.version else None
            for worker, microbatches in ranges(layout, cell.pipeline, portions):
                if worker == self._plan.worker and microbatches[0] != awaited:
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
            kept = self.kept.of(cell, step, (first, end)) if self._given.get(cell) == step else []
        self._resumed.pop(key, None)
        if kept:
            self._resumed[key] = beside
        return CellStep.of_portion(cell, self._plan.stages, layout, (first, end), stage, kept)

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
        """Keep the sum of finished groups of a cell, as its keeper or new owner. False if this worker is neither.

        Raises RefusedFrame.
        """
        address, plan = frame.address, self._plan.current
        stage, layout = self._states.stage(address.stage), self._committer.layout(address.step)
        keeps = plan.has(address.cell) and keeper(plan, address.cell) == self._plan.worker
        if layout is None or not (keeps or address.cell in self._awaited):
            return False
        if address.step > self._committer.log.newest:
            check_sum(frame, stage.values.final if stage else None, layout)
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
