"""The portions of cells that this worker runs in addition to its own: see `bamboo_core.planning.portions`."""

from collections.abc import Iterator, Set

from bamboo_core.planning.plan import Cell, Layout, Plan, WorkerId
from bamboo_core.planning.portions import Range, keeper, kept_by, ranges
from bamboo_core.planning.schedule import Backward, Forward, SendPartialSum
from bamboo_trainer.commit.committer import Committer
from bamboo_trainer.engine.steps.cell_step import CellStep
from bamboo_trainer.engine.steps.frame_fit import check_sum
from bamboo_trainer.engine.steps.kept_sums import KeptSums
from bamboo_trainer.frames.frame import Address, Frame, FrameKind
from bamboo_trainer.routing.message_log import MessageLog
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.stage_states import StageStates


class PortionSteps:
    """Steps of portions, by cell and microbatches. A portion that has begun continues while the plan allows it.

    The new owner of a lost cell waits for the sums that the keeper gives it, and runs the rest alone: the frames of
    kept groups have reached the neighbouring stages. No worker runs a portion whose sum the owner has. If a
    neighbouring stage changes hands and lacks frames that no log has, their microbatches run again, only for these
    frames: finished sums survive any number of losses.
    """

    def __init__(self, plan: PlanState, states: StageStates, committer: Committer, log: MessageLog) -> None:
        """Create the steps. committer: knows the layout of a step. log: of frames that this worker has sent."""
        self._plan, self._states, self._committer, self._log = plan, states, committer, log
        self.kept = KeptSums()
        self.steps: dict[tuple[Cell, Range], CellStep] = {}
        self.begun: list[CellStep] = []  # the new ones of them
        self._awaited: dict[
            Cell, tuple[int, WorkerId]
        ] = {}  # cells of which this worker gets sums: the step, from whom
        self._gives: dict[Cell, int] = {}  # cells whose sums it gives to the new owner, and in which step
        self._wanted: dict[tuple[Cell, int], tuple[int, int]] = {}  # see `want`
        self._summed: set[tuple[Cell, int, Range]] = set()  # portions whose sum the owner has, by cell and step
        self._early: dict[Address, Frame] = {}  # boundary tensors of portions that have not begun

    def await_kept(self, old: Plan | None, changed: Set[Cell]) -> None:
        """Wait for other workers' sums of cells that this worker owns from now on, or give sums away (`gives`).

        changed: cells that a plan in the middle of a step has given to others. old: the plan before it.
        """
        plan, step = self._plan.current, self._committer.log.newest + 1
        present = {peer.worker for peer in plan.workers}
        for cell in {*self._awaited, *self._gives} if plan.boundary else changed:
            self._awaited.pop(cell, None)
            self._gives.pop(cell, None)
        self._awaited = {cell: one for cell, one in self._awaited.items() if one[1] in present}
        self._summed = {one for one in self._summed if not plan.boundary and one[0] not in changed}
        self._wanted = {
            (c, other): wanted
            for (c, other), wanted in self._wanted.items()
            if not plan.boundary and changed.isdisjoint((c, Cell(c.pipeline, other)))
        }
        for cell in changed:
            assert old is not None
            giver = kept_by(old, self._plan.owner(cell), present, cell) if plan.at(cell).portions else None
            if giver and self._plan.owner(cell) == self._plan.worker != giver:
                self._awaited[cell] = step, giver
            elif giver == self._plan.worker != self._plan.owner(cell):
                self._gives[cell] = step

    def gives(self) -> Iterator[tuple[Cell, int, list[Frame], list[Frame]]]:
        """Yield each cell whose new owner waits for sums that this worker keeps, the step, the sums of the first groups
        up to a gap, and the other sums.
        """
        for cell, step in self._gives.items():
            layout, first, kept = self._committer.layout(step), list[Frame](), self.kept.all_of(cell, step)
            if layout is not None and cell.pipeline < layout.pipelines:
                own = layout.split[cell.pipeline]
                first = self.kept.of(cell, step, (own[0], own[-1] + 1))
            yield cell, step, first, [frame for frame in kept if not any(frame is one for one in first)]

    def covered(self, owned: CellStep) -> tuple[list[Range], list[Frame], list[tuple[WorkerId, Range]]]:
        """Divide a shared cell's microbatches into parts that use as many known sums as possible.

        Return the microbatches of each part, the sums that are here, and the plan's portions that these cover.
        """
        assert owned.layout is not None
        shared, place = list(ranges(owned.layout, owned.cell.pipeline, owned.portions)), 0
        parts, here, done = list[Range](), list[Frame](), list[tuple[WorkerId, Range]]()
        while place < len(shared):
            first = shared[place][1][0]
            for after in range(len(shared), place, -1):
                last = shared[after - 1][1][1]
                frames = self.kept.of(owned.cell, owned.step, (first, last))
                if frames and frames[-1].address.part == last:
                    parts += [(frame.address.microbatch, frame.address.part) for frame in frames]
                    here, done, place = [*here, *frames], [*done, *shared[place:after]], after
                    break
            else:
                parts.append(shared[place][1])
                place += 1
        return parts, here, done

    def summed(self, cell: Cell, step: int, microbatches: Range) -> bool:
        """Record that a cell's owner has the sum of a portion, and return whether this worker was running it.

        If so it is dropped, and the next `refresh` begins it again for the frames that neighbouring stages lack.
        """
        self._summed.add((cell, step, microbatches))
        one = self.steps.get((cell, microbatches))
        if one is None or one.step != step or not any(isinstance(i, SendPartialSum) for i in one.program[one.done :]):
            return False
        del self.steps[cell, microbatches]
        return True

    def kept_all(self, address: Address) -> bool:
        """Note that a cell's keeper has given all that it has kept. Return False if nothing waits for that."""
        return self._awaited.pop(address.cell, None) is not None

    def want(self, address: Address) -> list[CellStep]:
        """Record that a neighbouring stage lacks a cell's frames from a microbatch of a step on.

        Return the steps of portions here that lack some of them in the log and will not make them: they are dropped,
        and begin again with the next `refresh`.
        """
        cell, source = address.cell, address.part
        self._wanted[cell, source] = (address.step, address.microbatch)
        found = []
        for (of, microbatches), one in list(self.steps.items()):
            if (of, one.step) == (cell, address.step):
                coming = {i.microbatch for i in one.program[one.done :] if isinstance(i, Forward | Backward)}
                if self._lacking(cell, one.step, microbatches) - coming:
                    found.append(self.steps.pop((of, microbatches)))
        return found

    def lacks(self, owned: CellStep) -> bool:
        """Return whether a neighbouring stage wants frames of a cell's step that the log here does not have."""
        layout, pipeline = owned.layout, owned.cell.pipeline
        if layout is None or pipeline >= layout.pipelines:
            return False
        own = layout.split[pipeline]
        return bool(self._lacking(owned.cell, owned.step, (own[0], own[-1] + 1)))

    def _lacking(self, cell: Cell, step: int, microbatches: Range) -> set[int]:
        """Return the microbatches of these whose frames a neighbouring stage wants, and the log does not have."""
        found = set[int]()
        for kind, other in ((FrameKind.GRADIENT, cell.stage - 1), (FrameKind.ACTIVATION, cell.stage + 1)):
            wanted, since = self._wanted.get((cell, other), (-1, 0))
            for m in range(max(since, microbatches[0]), microbatches[1]) if wanted == step else ():
                if self._log.get(Address(kind, cell.pipeline, other, step, m)) is None:
                    found.add(m)
        return found

    def refresh(self, before: int) -> list[Frame]:
        """Begin and drop portions for a new plan or version. before: the first step after the job's last one.

        Return the kept boundary tensors, for the workers that now run their microbatches.
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
            waits = self._awaited.get(cell, (-1, ""))[0] == stage.values.version
            awaited = layout.split[cell.pipeline][0] if waits else None
            for worker, microbatches in ranges(layout, cell.pipeline, portions):
                if worker == self._plan.worker and microbatches[0] != awaited:
                    key = (cell, microbatches)
                    known = old.get(key)
                    if known is None or (known.step, known.layout) != (stage.values.version, layout):
                        known = self._begin(cell, microbatches, layout, stage)
                        self.begun.append(known)
                    self.steps[key] = known
        early, self._early = self._early, {}
        return list(early.values())

    def _begin(self, cell: Cell, microbatches: Range, layout: Layout, stage: Stage) -> CellStep:
        """Return the step of a portion, behind those of its first groups whose sums are here."""
        step, (first, end) = stage.values.version, microbatches
        is_done = (cell, step, microbatches) in self._summed
        is_done = is_done or self._log.get(Address(FrameKind.PARTIAL_SUM, *cell, step, first, end)) is not None
        kept = [] if is_done else self.kept.of(cell, step, microbatches)
        left = kept[-1].address.part if kept else end if is_done else first
        again = sorted(m for m in self._lacking(cell, step, microbatches) if m < left)
        return CellStep.of_portion(cell, self._plan.stages, layout, microbatches, stage, left, kept, again)

    def elsewhere(self, owned: CellStep) -> int:
        """Return how many of a shared cell's microbatches others run."""
        assert owned.layout is not None
        shared = ranges(owned.layout, owned.cell.pipeline, owned.portions)
        return sum(end - first for worker, (first, end) in shared if worker != self._plan.worker)

    def keep(self, frame: Frame) -> bool:
        """Keep the sum of finished groups of a cell, as its keeper or owner. Return False if this worker is neither.

        Raises RefusedFrame.
        """
        address, plan = frame.address, self._plan.current
        stage, layout = self._states.stage(address.stage), self._committer.layout(address.step)
        holders = (plan.at(address.cell).owner, keeper(plan, address.cell)) if plan.has(address.cell) else ()
        if layout is None or self._plan.worker not in holders:
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
