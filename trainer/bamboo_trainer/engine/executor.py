"""Runs the cells that this worker owns, instruction by instruction: the most urgent one that is ready."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec
from torch import Tensor

from bamboo.plan import Cell, Plan, WorkerId
from bamboo.protocol import CellFinished, Message, TakenOver
from bamboo_trainer.commit.committer import Committer
from bamboo_trainer.commit.repeated_steps import Repeated
from bamboo_trainer.commit.replicator import Replicator
from bamboo_trainer.engine.cell_step import CellStep, Takeover
from bamboo_trainer.engine.instructions import Instructions
from bamboo_trainer.engine.observer import Observer
from bamboo_trainer.engine.redundant_work import RedundantWork
from bamboo_trainer.engine.schedule import Forward, Instruction, ReportReady, needs
from bamboo_trainer.routing.outbox import Outbox
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.stage_states import StageStates
from bamboo_trainer.transport.frames import Address, Frame


class Executor:
    """cells: the step that each cell of this worker is in. handed_over: the last gradients of cells that moved away."""

    def __init__(
        self,
        plan: PlanState,
        outbox: Outbox,
        states: StageStates,
        committer: Committer,
        replicator: Replicator,
        redundant: RedundantWork,
        *,
        observer: Observer,
        clock: Callable[[], float],
        tell: Callable[[Message], None],
        steps: int,
        lookahead: int,
    ) -> None:
        self._plan, self._outbox, self._states = plan, outbox, states
        self._committer, self._replicator, self._redundant = committer, replicator, redundant
        self._observer, self._clock, self._tell = observer, clock, tell
        self._steps, self._lookahead = steps, lookahead
        self._instructions = Instructions(plan, outbox, states, replicator, steps)
        self.cells: dict[Cell, CellStep] = {}
        self.handed_over: dict[Cell, Frame] = {}
        self._left: dict[Cell, tuple[int, int]] = {}  # cells that moved away: the first and last step that was run here

    # roles

    def hand_over(self, old: Plan | None) -> None:
        """Stop running the cells that the plan in force gives to others. old: the one before."""
        plan, worker = self._plan.current, self._plan.worker
        for cell in [c for c in self.cells if c.pipeline >= len(plan.pipelines)]:
            del self.cells[cell]
        for cell in [c for c in self.cells if plan.at(c).owner != worker] if old else []:
            run = self.cells.pop(cell)
            self._left[cell] = (run.since, run.step)
            if self._states.has_final(cell.stage, self._committer.log.newest):
                self.handed_over[cell] = self._replicator.final_gradients(cell, self._committer.log.newest)
        if not plan.boundary:
            for run in self.cells.values():
                run.predecessor = None

    def take_over(self, old: Plan | None, arrived: float) -> None:
        """Run the cells that the plan in force gives to this worker. arrived: when it came, seconds of the clock."""
        for run in self.cells.values():
            if run.layout is None:
                self._begin(run)
        for cell in self._plan.current.owned_by(self._plan.worker):
            if cell not in self.cells:
                self._promote(cell, old, arrived)

    def _promote(self, cell: Cell, old: Plan | None, arrived: float) -> None:
        """The cell is run here from now on; its state stands where the replica stands."""
        boundary = self._plan.current.boundary
        run = self.cells[cell] = CellStep(cell)
        if old is not None and boundary and cell.pipeline < len(old.pipelines):
            run.predecessor = old.at(cell).owner
        self._begin(run)
        first, last = self._left.pop(cell, (run.step, -1))
        run.since = first if run.step <= last else run.step  # the log keeps what was sent when the cell was run here
        if cell in self._redundant.shadows:
            run.adopt(self._redundant.shadows[cell])
        if old is not None:
            now = self._clock()
            run.takeover = Takeover(arrived, now, now)
            if boundary and run.step > self._committer.log.newest:
                self._complete_takeover(run)  # a move at the boundary, and nothing is owed

    def link_broke(self, peer: WorkerId) -> None:
        for run in self.cells.values():
            if run.predecessor == peer:
                run.predecessor = None  # what it owed may be lost; the step can be repeated

    def relinked(self, peer: WorkerId) -> None:
        for cell, frame in self.handed_over.items():
            if self._plan.owner(cell) == peer:
                self._outbox.send(peer, replace(frame, epoch=self._plan.current.epoch))

    def committed(self, step: int) -> None:
        self.handed_over = {cell: frame for cell, frame in self.handed_over.items() if frame.address.step >= step}

    # steps

    def begin(self, stage: int) -> None:
        """The state of a stage is new: its cells start their next step."""
        for run in self.of_stage(stage):
            self._begin(run)

    def _begin(self, run: CellStep) -> None:
        stage = self._states.here(run.cell.stage)
        if stage is None:
            return
        if run.takeover and run.step >= 0:
            self._complete_takeover(run)
        if run.done < len(run.program):
            run.since = stage.version  # others ran that step, or a state of after it came: our log does not have it
        tied = bool(self._states.tied_to(run.cell.stage))
        run.start(stage, self._plan.stages, self._committer.layout(stage.version), tied, self._lookahead)
        if stage.version >= self._steps and not run.finished and run.program:
            run.finished = True
            self._tell(CellFinished(cell=run.cell, digest=stage.digest()))

    def of_stage(self, stage: int) -> list[CellStep]:
        return [run for run in self.cells.values() if run.cell.stage == stage]

    def active(self) -> CellStep | None:
        """The one cell that is run here, if it is one, and not at its end."""
        runs = [run for run in self.cells.values() if run.program]
        return runs[0] if len(runs) == 1 and runs[0].step < self._steps else None

    def accept(self, frame: Frame) -> None:
        self.cells[frame.address.cell].accept(frame)

    # instructions

    def next_ready(self) -> CellStep | None:
        """The cell whose next instruction is the most urgent of those that can run now."""
        ready = [run for run in self.cells.values() if self._is_ready(run)]
        return min(ready, key=lambda run: run.urgency) if ready else None

    def _is_ready(self, run: CellStep) -> bool:
        instruction = run.next
        if instruction is None or run.layout is None or run.step >= self._steps:
            return False
        if self._plan.is_outdated and run.step > self._committer.log.newest:
            return False
        if run.predecessor is not None:
            if run.step in self._committer.log.commits:
                return False  # its last gradients are on the way; repeating the step would be waste
            run.predecessor = None
        if isinstance(instruction, ReportReady):
            # with the owner of several cells the log of what they sent to each other is lost, too
            strict = len([r for r in self.cells.values() if r.program]) > 1
            return not self._replicator.holds_back(run.cell, run.step, strict)
        return all(address in run.inbox for address in self._needed(run, [instruction]))

    def _needed(self, run: CellStep, instructions: Sequence[Instruction]) -> list[Address]:
        """The frames that these instructions of a cell's step take in."""
        assert run.layout is not None
        tied, stages = self._states.tied_to(run.cell.stage), self._plan.stages
        return [
            address
            for instruction in instructions
            if not run.has_begun_ahead(instruction)
            for address in needs(instruction, run.cell, stages, run.layout, run.step, tied)
        ]

    def execute(self, run: CellStep) -> None:
        """The cell's next instruction, which is ready."""
        instruction = run.next
        assert instruction is not None
        name, microbatch = type(instruction).__name__, getattr(instruction, "microbatch", 0)
        if run.takeover:
            inputs = [run.inbox[a] for a in self._needed(run, [instruction])]
            if inputs and not any(f.again for f in inputs):
                self._complete_takeover(run)  # these were never sent to the one before: no repetition follows
            else:
                run.takeover.count(instruction, reused=run.is_ahead(instruction))
        begun = self._clock()
        self._redundant.end_wait(run, begun)
        self._observer.started(name, run.cell, run.step, microbatch)
        self._instructions.execute(run, instruction)
        run.done += 1
        stage = self._states.here(run.cell.stage)
        if stage:
            stage.wait()
        self._observer.finished(name, run.cell, run.step, microbatch)
        ended = self._clock()
        if run.takeover:
            run.takeover.until = ended
            if run.next is None:
                self._complete_takeover(run)  # the cell may move on with the commit
        if isinstance(instruction, Forward) and stage:
            self._redundant.budget.ran_forward(ended - begun, stage.layers)

    def _complete_takeover(self, run: CellStep) -> None:
        takeover, run.takeover = run.takeover, None
        assert takeover is not None
        plan = self._plan.current
        taken = TakenOver(
            epoch=plan.epoch,
            cell=run.cell,
            step=run.step,
            reform_ms=(takeover.applied - takeover.arrived) * 1e3,
            recompute_ms=(takeover.until - takeover.applied) * 1e3,
            forwards=takeover.forwards,
            reused=takeover.reused,
            backwards=takeover.backwards,
        )
        self._tell(taken)
        self._observer.event("Move" if plan.boundary else "Takeover", **msgspec.structs.asdict(taken))

    # what others ask

    def repeated(self) -> Iterator[Repeated]:
        """The committed steps that are repeated here, without a predecessor who would still send what came of them."""
        for run in self.cells.values():
            committed = run.step in self._committer.log.commits
            if not run.program or not committed or self._states.has_final(run.cell.stage, run.step):
                continue
            if run.predecessor is None:
                lacks = [a for a in self._needed(run, run.program[run.done :]) if a not in run.inbox]
                yield Repeated(run.cell, run.step, lacks)

    def since(self) -> dict[Cell, int]:
        """The first step in this worker's log, by its own cells."""
        return {run.cell: run.since for run in self.cells.values()}

    def report(self) -> None:
        """To the coordinator, which may have missed it."""
        for run in self.cells.values():
            stage = self._states.here(run.cell.stage)
            if run.finished and stage:
                self._tell(CellFinished(cell=run.cell, digest=stage.digest()))

    def waits_for(self) -> str:
        """Why there is no work right now, for a person."""
        for run in self.cells.values():
            if run.predecessor is not None:
                return f"the last gradients of {run.cell} from {run.predecessor}"
            if run.next is None or run.layout is None:
                return f"the commit of step {run.step}" if run.step < self._steps else "the others to finish"
            missing = [a for a in self._needed(run, [run.next]) if a not in run.inbox]
            if missing:
                kind, d, s, step, m, _ = missing[0]
                return f"{kind.name} for stage {s} of pipeline {d}, step {step}, microbatch {m}"
            if isinstance(run.next, ReportReady):
                return f"a replica of stage {run.cell.stage} of pipeline {run.cell.pipeline}"
        return "a part"

    def gradients(self) -> Iterator[Tensor]:
        """Those of steps in progress, and of cells that moved away."""
        for run in self.cells.values():
            if run.work:
                yield run.work.gradient
            if run.final is not None:
                yield run.final
        for frame in self.handed_over.values():
            yield from frame.tensors
