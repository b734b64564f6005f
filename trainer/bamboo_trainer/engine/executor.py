"""Execution of this worker's cells, instruction by instruction: usually the most urgent one that is ready."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import msgspec

from bamboo_core.control.protocol import CellFinished, TakenOver
from bamboo_core.planning.plan import Cell, Plan, WorkerId
from bamboo_core.planning.schedule import AddPartialSums, Backward, Instruction, ReportReady
from bamboo_trainer.commit.committer import Committer
from bamboo_trainer.commit.replication import Repeated, Replicator
from bamboo_trainer.engine.cell_step import CellStep, TakeoverProgress
from bamboo_trainer.engine.determinism import SpotChecks
from bamboo_trainer.engine.instructions import Instructions
from bamboo_trainer.engine.portions import PortionSteps
from bamboo_trainer.engine.ports import EngineContext
from bamboo_trainer.frames import REDUCED, Address, Frame, FrameKind
from bamboo_trainer.stage.stage import Stage


class Executor:
    """The executor of a worker's cells. cells: their steps. handed_over: final gradients of moved cells, to resend."""

    def __init__(self, shared: EngineContext, committer: Committer, replicator: Replicator, spots: SpotChecks) -> None:
        self._shared, self._plan, self._outbox, self._states = shared, shared.plan, shared.outbox, shared.states
        self._committer, self._replicator, self._devices = committer, replicator, shared.devices
        self._observer, self._clock = shared.ports.observer, shared.ports.clock
        self._coordinator, self._evaluations = shared.coordinator, shared.ports.evaluations
        self.cells: dict[Cell, CellStep] = {}
        self.portions = PortionSteps(shared, replicator, self.cells)
        self._instructions = Instructions(shared, replicator, spots, self.portions)
        self.backwards = 0  # number run here
        self.handed_over: dict[Cell, Frame] = {}
        self._runnable: list[CellStep] | None = None  # steps that may run; None: unknown
        self._left: dict[Cell, tuple[int, int]] = {}  # cells that moved away: the first and last step that was run here

    @property
    def _last(self) -> int:
        """The last step with instructions: the last training step or, if the job evaluates, the evaluation after it."""
        return self._shared.steps if self._evaluations else self._shared.steps - 1

    # roles

    def hand_over(self, old: Plan | None) -> None:
        """Stop running cells that the plan drops or moves; send new owners the final gradients queued for them."""
        plan, worker = self._plan.current, self._plan.worker
        for cell in [c for c in self.cells if c.pipeline >= len(plan.pipelines)]:
            del self.cells[cell]
        for cell in [c for c in self.cells if plan.at(c).owner != worker] if old else []:
            if not plan.boundary:
                self.portions.keep_finished(cell)
            cell_step = self.cells.pop(cell)
            self._left[cell] = (cell_step.since, cell_step.step)
            newest = self._shared.log.newest
            if self._states.has_final(cell.stage, newest):
                self.handed_over[cell] = self._replicator.hand_over(cell, plan.at(cell).owner, newest)
        if not plan.boundary:
            for cell_step in self.cells.values():
                cell_step.predecessor = None

    def take_over(self, old: Plan | None, arrived: float) -> None:
        """Begin to run cells that the plan newly gives this worker; adapt others. arrived: see `TakeoverProgress`."""
        for cell_step in self.portions.cell_steps():
            cell_step.kept = 0  # there may be another keeper
        for cell_step in self.cells.values():
            if cell_step.layout is None:
                self._begin(cell_step)
            elif cell_step.step > self._shared.log.newest and cell_step.awaits_gradients:
                self._share(cell_step)
        for cell in self._plan.current.owned_by(self._plan.worker):
            if cell not in self.cells:
                self._promote(cell, old, arrived)
        self.portions.take_over(old)

    def _share(self, cell_step: CellStep) -> None:
        """Adjust a step to the plan's portions of its cell; start it again if sharing of its cell begins or ends."""
        portions = self._plan.current.at(cell_step.cell).portions
        if portions and cell_step.portions:
            cell_step.portions = portions
        elif portions != cell_step.portions:
            self._start(cell_step, self._states.running(cell_step.cell))

    def _promote(self, cell: Cell, old: Plan | None, arrived: float) -> None:
        """Add a cell to the ones run here; its step begins once its state is here. old: the plan before, if any."""
        boundary = self._plan.current.boundary
        cell_step = self.cells[cell] = CellStep(cell)
        if old is not None and boundary and cell.pipeline < len(old.pipelines):
            cell_step.predecessor = old.at(cell).owner
        cell_step.in_midstep = old is not None and not boundary
        self._begin(cell_step)
        first, last = self._left.pop(cell, (cell_step.step, -1))
        # the log keeps what was sent when the cell was run here
        cell_step.since = first if cell_step.step <= last else cell_step.step
        if old is not None:
            now = self._clock()
            cell_step.takeover = TakeoverProgress(arrived, now, now)
            if boundary and cell_step.step > self._shared.log.newest:
                self._complete_takeover(cell_step)  # a move at the boundary, and nothing is owed

    def repeat(self, sender: WorkerId, frame: Frame) -> bool:
        """Resend or recompute frames that a neighbouring stage lacks; return False if `PortionSteps.repeat` refuses."""
        if not self.portions.repeat(sender, frame):
            return False
        owned = self.cells.get(frame.address.cell)
        if owned and owned.portions and not self._plan.current.at(owned.cell).portions and self.portions.lacks(owned):
            self._run_alone(owned)  # the plan no longer shares the cell, so no portion makes these frames
        return True

    def link_broke(self, peer: WorkerId) -> None:
        for cell_step in self.cells.values():
            if cell_step.predecessor == peer:
                cell_step.predecessor = None  # what it owed may be lost; the step can be repeated

    def relinked(self, peer: WorkerId) -> None:
        for cell, frame in self.handed_over.items():
            if self._plan.owner(cell) == peer:
                self._outbox.send(peer, replace(frame, epoch=self._plan.current.epoch))
        self.portions.relinked(peer)

    def committed(self, step: int) -> None:
        self.handed_over = {cell: frame for cell, frame in self.handed_over.items() if frame.address.step >= step}
        self.portions.kept.committed(step)
        for cell_step in self.cells.values():
            if cell_step.step == step:
                cell_step.skip_evaluation()
                if cell_step.portions and cell_step.awaits_gradients:
                    self._run_alone(cell_step)
                self._finish_if_over(cell_step)

    # steps

    def begin(self, stage: int) -> None:
        """Start the next step of a stage's cells, since the stage has a new state."""
        for cell_step in self.of_state(stage):
            self._begin(cell_step)
            self.portions.gather(cell_step)
        self.portions.refresh()

    def _begin(self, cell_step: CellStep) -> None:
        stage = self._states.stage(cell_step.cell.stage)
        if stage is None:
            return
        if cell_step.takeover and cell_step.step >= 0:
            self._complete_takeover(cell_step)
        if cell_step.done < len(cell_step.program):
            # others ran that step, or a later state came: this worker's log does not have it
            cell_step.since = stage.values.version
        self._start(cell_step, stage)
        self._finish_if_over(cell_step)

    def _start(self, cell_step: CellStep, stage: Stage) -> None:
        step, committed = stage.values.version, self._shared.log.commits
        tied_to, layout = self._states.tied_to(cell_step.cell), self._shared.layout(step)
        left_out = layout is not None and cell_step.cell.pipeline >= layout.pipelines  # portions are of older steps
        over = left_out or step <= self._shared.log.newest
        cell_step.portions = () if over else self._plan.current.at(cell_step.cell).portions
        if cell_step.portions:
            cell_step.since = step + 1  # what the step sends is in the logs of all its runners
        evaluated = self._evaluations.batches_of(step) if self._evaluations and step not in committed else 0
        only_evaluates = self._evaluations is not None and step >= self._shared.steps
        cell_step.start(stage, self._plan.stages, layout, tied_to, evaluated, only_evaluates=only_evaluates)

    def _run_alone(self, cell_step: CellStep) -> None:
        """Restart a shared cell's step with all its microbatches here: other workers no longer run its portions."""
        self._start(cell_step, self._states.running(cell_step.cell))
        cell_step.since = cell_step.step
        self._outbox.resend(cell_step.cell, self._plan.worker)  # others send what they have when they are asked

    def _finish_if_over(self, cell_step: CellStep) -> None:
        """Report the cell as finished once the last step is applied, and the final evaluation, if any, committed."""
        held, step = self._states.here(cell_step.cell.stage), cell_step.step
        if cell_step.finished or cell_step.work is None or held is None or step < self._shared.steps:
            return
        if self._evaluations is None or step in self._shared.log.commits:
            cell_step.finished = True
            self._coordinator.tell(CellFinished(cell=cell_step.cell, digest=held.digest()))

    def ran(self) -> set[int]:
        """Return the stages whose cells on this worker have run all instructions of their current step."""
        behind = {c.stage for c, cell_step in self.cells.items() if cell_step.next or cell_step.layout is None}
        return {c.stage for c in self.cells} - behind

    def of_state(self, number: int) -> list[CellStep]:
        """Return the current steps of a stage's cells that this worker owns. number: the stage's number."""
        return [cell_step for cell_step in self.cells.values() if cell_step.cell.stage == number]

    def active(self) -> tuple[CellStep, ...]:
        """Return the step of the only cell run here (of each device stage); () if several run or training is over."""
        cell_steps = [cell_step for cell_step in self.cells.values() if cell_step.program]
        if len(cell_steps) > 1 and not self._plan.are_parts(one.cell for one in cell_steps):
            return ()
        return tuple(cell_step for cell_step in cell_steps if cell_step.step < self._shared.steps)

    # instructions

    def next_ready(self, only: type[object] = object) -> CellStep | None:
        """Return the step with the most urgent instruction that can run now, or None. only: the instruction's type."""
        if self._runnable is None:
            self._runnable = [one for one in self.portions.cell_steps() if self._may_run(one)]
        ready = [one for one in self._runnable if one.next and isinstance(one.next, only) and self._is_ready(one)]
        if len(ready) > 1:
            return min(ready, key=lambda cell_step: cell_step.urgency)
        return ready[0] if ready else None

    def look_again(self) -> None:
        """Drop the cached list of steps that may run, after a change that may affect it."""
        self._runnable = None

    def _may_run(self, cell_step: CellStep) -> bool:
        """Return whether the next instruction may run once it is ready (`_is_ready`); if so, forget the predecessor."""
        if cell_step.next is None or cell_step.layout is None or cell_step.finished or cell_step.step > self._last:
            return False
        if self._committer.is_cut(cell_step.step):
            return False
        if self._plan.is_outdated and cell_step.step > self._shared.log.newest:
            return False
        if cell_step.is_portion and cell_step.step in self._shared.log.commits:
            return False
        if cell_step.predecessor is not None:
            if cell_step.step in self._shared.log.commits:
                return False  # its last gradients are on the way; repeating the step would be waste
            cell_step.predecessor = None
        return True

    def _is_ready(self, cell_step: CellStep) -> bool:
        if isinstance(cell_step.next, ReportReady):
            if cell_step.figures is not None and not cell_step.figures.ready():
                return False
            strict = cell_step.step < self._shared.steps and self._must_not_be_repeated(cell_step)
            return not self._replicator.holds_back(cell_step.cell, cell_step.step, strict)
        return cell_step.has_inputs

    def _must_not_be_repeated(self, cell_step: CellStep) -> bool:
        """Return whether heirs that repeat the cell's step after a loss might lack frames that only lost workers have
        logged. True if this worker runs cells that are not all parts of one stage; if adjacent stages lost together may
        get different heirs; if several workers share a cell of the pipeline; or if several workers may be lost together
        and the stage is tied to one that is not adjacent to it (the last stage is adjacent to the first).
        """
        if not self._plan.are_parts(r.cell for r in self.cells.values() if r.program) or self._plan.heirs_may_differ:
            return True
        if any(assignment.portions for assignment in self._plan.current.pipelines[cell_step.cell.pipeline]):
            return True  # what the step sent is in the logs of several workers
        s, depth = cell_step.cell.stage, self._plan.stages
        several = len(self._plan.current.at(cell_step.cell).replicas) > 1 or self._plan.nodes_are_shared
        tied = self._states.tied_to(cell_step.cell)
        return several and any((s - other) % depth not in (1, depth - 1) for other in tied)

    def execute(self, cell_step: CellStep) -> None:
        """Run the next instruction of a cell's or portion's step, which must be ready."""
        instruction = cell_step.next
        assert instruction is not None
        cell, microbatch = cell_step.cell, getattr(instruction, "microbatch", 0)
        place = (type(instruction).__name__, cell, cell_step.step, microbatch)
        self._count_repetition(cell_step, instruction)
        ordinary = cell_step.is_ordinary(self._shared.log.newest)
        took = partial(self._shared.timer.ran, cell.stage, instruction) if ordinary else None
        with self._devices.measuring(self._states.stage(cell.stage), took):
            self._observer.started(*place)
            self._instructions.execute(cell_step, instruction)
            cell_step.done += 1
            self._observer.finished(*place)
        self.backwards += isinstance(instruction, Backward)
        if cell_step.takeover:
            cell_step.takeover.until = self._clock()
            if cell_step.next is None:
                self._complete_takeover(cell_step)  # the cell may move on with the commit

    def _count_repetition(self, cell_step: CellStep, instruction: Instruction) -> None:
        """Count an instruction as repeated work of a takeover, if any; new inputs may complete the takeover instead."""
        takeover = cell_step.takeover
        if takeover is None:
            owned = self.cells.get(cell_step.cell) if cell_step.is_portion else None
            if owned and owned.takeover:  # this worker owns the portion's cell
                owned.takeover.count(instruction)
        elif isinstance(instruction, AddPartialSums):
            takeover.repeated_elsewhere(self.portions.elsewhere(cell_step))
        else:
            inputs = [cell_step.inbox[a] for a in cell_step.inputs[cell_step.done]]
            if inputs and not any(f.again or self._is_repeated_here(f.address) for f in inputs):
                self._complete_takeover(cell_step)  # these were never sent to the predecessor: no repetition follows
            else:
                takeover.count(instruction)

    def _is_repeated_here(self, address: Address) -> bool:
        """Return whether an activation or gradient is from a device stage taken over together with its receiver."""
        cell, behind = address.cell, address.kind is FrameKind.GRADIENT
        source = Cell(cell.pipeline, cell.stage + (1 if behind else -1))
        if self._plan.devices == 1 or source not in self.cells or not self._plan.are_parts((cell, source)):
            return False
        return self.cells[source].takeover is not None

    def _complete_takeover(self, cell_step: CellStep) -> None:
        takeover, cell_step.takeover = cell_step.takeover, None
        assert takeover is not None
        stage, plan = self._states.stage(cell_step.cell.stage), self._plan.current
        if stage is not None and stage.runs_ahead and (takeover.forwards or takeover.backwards):
            stage.wait()  # for the repeated work, once: until then the device kept the order
            takeover.until = max(takeover.until, self._devices.freed(cell_step.cell.stage) or 0.0)
        taken = TakenOver(
            epoch=plan.epoch,
            cell=cell_step.cell,
            step=cell_step.step,
            reform_ms=(takeover.applied - takeover.arrived) * 1e3,
            recompute_ms=(takeover.until - takeover.applied) * 1e3,
            forwards=takeover.forwards,
            backwards=takeover.backwards,
        )
        self._coordinator.tell(taken)
        self._observer.event("Move" if plan.boundary else "Takeover", **msgspec.structs.asdict(taken))

    def waits_at_end(self, cell: Cell) -> bool:
        """Return whether this worker's cells of this stage have no instruction left, and no takeover is in progress."""
        is_done = all(cell_step.next is None for cell_step in self.of_state(cell.stage))
        return is_done and not any(cell_step.takeover for cell_step in self.cells.values())

    # what others ask

    def repeated(self) -> Iterator[Repeated]:
        """Yield the committed steps that this worker repeats, because no predecessor sends their results any more."""
        for cell_step in self.cells.values():
            committed = cell_step.step in self._shared.log.commits and cell_step.step < self._shared.steps
            number = cell_step.cell.stage
            if not cell_step.program or not committed or self._states.has_final(number, cell_step.step):
                continue
            if cell_step.predecessor is None:
                yield Repeated(cell_step.cell, cell_step.step, cell_step.lacking())

    def since(self) -> dict[Cell, int]:
        """Return, for each cell run here, the first step in which its frames were logged here (`CellStep.since`)."""
        return {cell_step.cell: cell_step.since for cell_step in self.cells.values()}

    def report(self) -> None:
        """Report finished cells to the coordinator again."""
        for cell_step in self.cells.values():
            held = self._states.here(cell_step.cell.stage)
            if cell_step.finished and held:
                self._coordinator.tell(CellFinished(cell=cell_step.cell, digest=held.digest()))

    def waits_for(self) -> str:
        """Return what this worker waits for while it has no work, as text for the user."""
        if self._committer.is_cut(self._shared.log.newest + 1):
            return "the layers to be split anew"
        for cell_step in self.cells.values():
            if cell_step.predecessor is not None:
                return f"the last gradients of {cell_step.cell} from {cell_step.predecessor}"
            if cell_step.next is None or cell_step.layout is None:
                waits = not cell_step.finished and cell_step.step <= self._last
                return f"the commit of step {cell_step.step + 1}" if waits else "the others to finish"
            missing = cell_step.lacking(cell_step.done + 1)
            if missing:
                kind, d, s, step, m, _ = missing[0]
                which = "bucket" if kind in REDUCED else "microbatch"
                return f"{kind.name} for stage {s} of pipeline {d}, step {step + 1}, {which} {m}"
            if isinstance(cell_step.next, ReportReady):
                return f"a replica of stage {cell_step.cell.stage} of pipeline {cell_step.cell.pipeline}"
        return "a part"
