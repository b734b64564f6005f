"""Execution of this worker's cells, instruction by instruction: always the most urgent one that is ready."""

from collections.abc import Container, Iterator
from dataclasses import replace
from functools import partial

import msgspec

from bamboo_core.control.protocol import CellFinished, TakenOver
from bamboo_core.planning.plan import Cell, Plan, WorkerId
from bamboo_core.planning.portions import changed_cells, keeper
from bamboo_core.planning.schedule import (
    AddPartialSums,
    Backward,
    Forward,
    ReportReady,
)
from bamboo_trainer.commit.committer import Committer
from bamboo_trainer.commit.repeated_steps import Repeated
from bamboo_trainer.commit.replicator import Replicator
from bamboo_trainer.engine.ports import Ports
from bamboo_trainer.engine.stage_times import StageTimer
from bamboo_trainer.engine.steps.cell_step import CellStep, Evaluating, TakeoverProgress
from bamboo_trainer.engine.steps.device_times import DeviceTimes
from bamboo_trainer.engine.steps.instructions import Instructions
from bamboo_trainer.engine.steps.portion_steps import PortionSteps
from bamboo_trainer.engine.steps.spot_checks import SpotChecks
from bamboo_trainer.frames.frame import REDUCED, Address, Frame, FrameFacts, FrameKind, is_of_microbatch
from bamboo_trainer.routing.outbox import Outbox
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.gradients.partial_sums import packed_work
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.stage_states import StageStates


class Executor:
    """Runs cells. cells: the current step of each of them. handed_over: last gradients of cells that moved away."""

    def __init__(
        self,
        plan: PlanState,
        outbox: Outbox,
        states: StageStates,
        committer: Committer,
        replicator: Replicator,
        spots: SpotChecks,
        timer: StageTimer,
        devices: DeviceTimes,
        ports: Ports,
    ) -> None:
        self._plan, self._outbox, self._states = plan, outbox, states
        self._committer, self._replicator = committer, replicator
        self._observer, self._clock, self._timer, self._devices = ports.observer, ports.clock, timer, devices
        self._coordinator = ports.coordinator
        self._wanted = ports.steps
        self._evaluations = ports.evaluations
        self._instructions = Instructions(
            plan, outbox, states, replicator, spots, devices, ports.copies, steps=ports.steps, clock=ports.clock
        )
        self._spots = spots
        self.cells: dict[Cell, CellStep] = {}
        self.backwards = 0  # run here
        self._portions = PortionSteps(plan, states, committer, outbox.log)
        self.handed_over: dict[Cell, Frame] = {}
        self._runnable: list[CellStep] | None = None  # steps that may run; None: unknown
        self._left: dict[Cell, tuple[int, int]] = {}  # cells that moved away: the first and last step that was run here

    @property
    def steps(self) -> int:
        """The number of the job's steps: the requested ones, or those before an early stop."""
        end = self._committer.log.end
        return self._wanted if end is None else end

    @property
    def _last(self) -> int:
        """The last step with instructions: after the last step the final state is evaluated."""
        return self.steps if self._evaluations else self.steps - 1

    # roles

    def hand_over(self, old: Plan | None) -> None:
        """Stop running the cells that the plan in force gives to others. old: the one before."""
        plan, worker = self._plan.current, self._plan.worker
        for cell in [c for c in self.cells if c.pipeline >= len(plan.pipelines)]:
            del self.cells[cell]
        for cell in [c for c in self.cells if plan.at(c).owner != worker] if old else []:
            for one in self.cell_steps() if not plan.boundary else ():
                if one.cell == cell:
                    self._keep_finished(one)
            cell_step = self.cells.pop(cell)
            self._left[cell] = (cell_step.since, cell_step.step)
            newest = self._committer.log.newest
            if self._states.has_final(cell.stage, newest):
                self.handed_over[cell] = self._replicator.hand_over(cell, plan.at(cell).owner, newest)
        if not plan.boundary:
            for cell_step in self.cells.values():
                cell_step.predecessor = None

    def _keep_finished(self, one: CellStep) -> None:
        """Keep finished groups' sums of a cell or portion for the worker that continues with it (`_give_kept`)."""
        cell, layout, work = one.cell, one.layout, one.work
        if layout is None or cell.pipeline >= layout.pipelines or one.step <= self._committer.log.newest:
            return
        if work is None or one.final is not None or work.parts or not work.gradients.finished:
            return  # the sum may just be turning into the step's gradient, in the same place
        finished = work.gradients.finished
        microbatches = (layout.bounds[finished[0][0].first], layout.bounds[finished[-1][0].end])
        payload, tensors = packed_work(work, microbatches, finished)
        address = Address(FrameKind.KEPT_SUM, *cell, one.step, *microbatches)
        self._portions.kept.keep(self._outbox.frame(address, tensors, payload))

    def take_over(self, old: Plan | None, arrived: float) -> None:
        """Run the cells that the plan in force gives to this worker. arrived: when it came, seconds of the clock."""
        plan, newest = self._plan.current, self._committer.log.newest
        changed = changed_cells(plan, old) if old and not plan.boundary else set()
        for cell_step in self.cell_steps():
            cell_step.kept = 0  # there may be another keeper
        for cell_step in self.cells.values():
            if cell_step.layout is None:
                self._begin(cell_step)
            elif cell_step.step > newest and cell_step.awaits_gradients:
                self._share(cell_step)
        for cell in self._plan.current.owned_by(self._plan.worker):
            if cell not in self.cells:
                self._promote(cell, old, arrived)
        for cell_step in self.cell_steps():
            self._ask_beside(cell_step, changed)
        self._portions.await_kept(old, changed)
        for cell_step in self.cells.values():
            cell_step.passed = {one for one in cell_step.passed if one[1].kind is not FrameKind.SUMMED}
            self._gather_sums(cell_step)
        self._refresh_portions()
        self._give_kept()

    def _ask_beside(self, cell_step: CellStep, beside: Container[Cell], *, again: bool = False) -> None:
        """Tell the runners of these cells from which microbatch on the step lacks frames. again: also of their logs."""
        plan, (d, s), step, layout = self._plan.current, cell_step.cell, cell_step.step, cell_step.layout
        if layout is None or d >= layout.pipelines or step <= self._committer.log.newest:
            return
        is_reported = cell_step.next is None and not cell_step.is_portion
        for kind, source in ((FrameKind.ACTIVATION, Cell(d, s - 1)), (FrameKind.GRADIENT, Cell(d, s + 1))):
            if source not in beside:
                continue
            lacks = [a.microbatch for a in cell_step.lacking() if a.kind is kind and is_of_microbatch(a)]
            if is_reported and self._replicator.holds_back(cell_step.cell, step, strict=True):
                lacks = [layout.split[d][0]]  # a replica may have to repeat the step when it is committed
            if lacks:
                address = Address(FrameKind.REPEAT, *source, step, min(lacks), s)
                for worker in plan.at(source).runners:
                    self._outbox.post(worker, address, (), FrameFacts(again=True) if again else None)

    def repeat(self, sender: WorkerId, frame: Frame) -> bool:
        """Make a cell's frames that a neighbouring stage lacks. Return False if its microbatches do not run here."""
        address, plan = frame.address, self._plan.current
        beside = Cell(address.pipeline, address.part)
        if not plan.has(address.cell) or not plan.has(beside) or address.step <= self._committer.log.newest:
            return False
        if self._plan.worker not in plan.at(address.cell).runners or sender not in plan.at(beside).runners:
            return False
        self._outbox.finish()  # what is made is in the log
        if frame.again:
            self._outbox.resend(beside, sender, since=address)
        lacking = self._portions.want(address)
        for portion in lacking:
            self._keep_finished(portion)
        if lacking:
            self._refresh_portions(again=True)
        owned = self.cells.get(address.cell)
        if owned and owned.portions and not plan.at(address.cell).portions and self._portions.lacks(owned):
            self._run_alone(owned)  # the plan no longer shares the cell, so no portion makes these frames
        return True

    def _share(self, cell_step: CellStep) -> None:
        """Adjust to a plan's new portions, in the middle of a step or at its start."""
        portions = self._plan.current.at(cell_step.cell).portions
        if portions and cell_step.portions:
            cell_step.portions = portions
        elif portions != cell_step.portions:
            self._start(cell_step, self._states.running(cell_step.cell))

    def _promote(self, cell: Cell, old: Plan | None, arrived: float) -> None:
        """Run the cell here from now on, from the replica's state."""
        boundary = self._plan.current.boundary
        cell_step = self.cells[cell] = CellStep(cell)
        if old is not None and boundary and cell.pipeline < len(old.pipelines):
            cell_step.predecessor = old.at(cell).owner
        cell_step.in_midstep = old is not None and not boundary
        self._begin(cell_step)
        first, last = self._left.pop(cell, (cell_step.step, -1))
        cell_step.since = (
            first if cell_step.step <= last else cell_step.step
        )  # the log keeps what was sent when the cell was run here
        if old is not None:
            now = self._clock()
            cell_step.takeover = TakeoverProgress(arrived, now, now)
            if boundary and cell_step.step > self._committer.log.newest:
                self._complete_takeover(cell_step)  # a move at the boundary, and nothing is owed

    def _give_kept(self, owner: WorkerId | None = None) -> None:
        """Give the sums that this worker keeps to the new owners of their cells. owner: only to that one."""
        for cell, step, first, others in self._portions.gives():
            receiver = self._plan.owner(cell)
            if owner in (None, receiver):
                for frame in first:
                    self._outbox.post(receiver, frame.address, frame.tensors, frame.payload)
                self._outbox.post(receiver, Address(FrameKind.KEPT_ALL, *cell, step), (), None)
                for frame in others:
                    self._outbox.post(receiver, frame.address, frame.tensors, frame.payload)

    def _gather_sums(self, cell_step: CellStep) -> None:
        """Add the available sums of this worker's shared cell; send them to its keeper, and inform the runners."""
        cell, step, layout = cell_step.cell, cell_step.step, cell_step.layout
        if not cell_step.portions or layout is None or step <= self._committer.log.newest:
            return
        if cell.pipeline >= layout.pipelines:
            return  # the job drops the cell's pipeline
        for address, frame in cell_step.inbox.items():
            if address.kind is FrameKind.PARTIAL_SUM and address.step == step:
                self._portions.kept.keep(replace(frame, address=address._replace(kind=FrameKind.KEPT_SUM)))
        parts, here, portions = self._portions.covered(cell_step)
        cell_step.await_sums(parts, self._plan.stages)
        keeps = keeper(self._plan.current, cell) if layout.pipelines > 1 or len(here) < len(parts) else None
        for frame in here:
            cell_step.accept(replace(frame, address=frame.address._replace(kind=FrameKind.PARTIAL_SUM)), None)
            if keeps is not None:
                self._pass(cell_step, keeps, frame)
        dropped = False
        for worker, microbatches in portions:
            if worker == self._plan.worker:
                dropped = self._portions.summed(cell, step, microbatches) or dropped
            else:
                self._pass(cell_step, worker, self._outbox.frame(Address(FrameKind.SUMMED, *cell, step, *microbatches)))
        if dropped:
            self._refresh_portions(again=True)

    def _pass(self, cell_step: CellStep, worker: WorkerId, frame: Frame) -> None:
        """Send a frame to a worker, once."""
        if (worker, frame.address) not in cell_step.passed:
            self._outbox.post(worker, frame.address, frame.tensors, frame.payload)
            cell_step.passed.add((worker, frame.address))

    def summed(self, sender: WorkerId, address: Address) -> None:
        """Stop running a portion: the cell's owner has its sum."""
        plan = self._plan.current
        if not plan.has(address.cell) or plan.at(address.cell).owner != sender:
            return
        if self._portions.summed(address.cell, address.step, (address.microbatch, address.part)):
            self._refresh_portions(again=True)

    def link_broke(self, peer: WorkerId) -> None:
        for cell_step in self.cells.values():
            if cell_step.predecessor == peer:
                cell_step.predecessor = None  # what it owed may be lost; the step can be repeated

    def relinked(self, peer: WorkerId) -> None:
        for cell, frame in self.handed_over.items():
            if self._plan.owner(cell) == peer:
                self._outbox.send(peer, replace(frame, epoch=self._plan.current.epoch))
        plan = self._plan.current
        of_peer = {cell for cell in plan.cells() if peer in plan.at(cell).runners}
        for cell_step in self.cell_steps():
            cell_step.kept = 0  # what was on its way to the keeper may be lost
            self._ask_beside(cell_step, of_peer)
        for cell_step in self.cells.values():
            cell_step.passed = {one for one in cell_step.passed if one[0] != peer}
            self._gather_sums(cell_step)
        self._give_kept(peer)

    def committed(self, step: int) -> None:
        self.handed_over = {cell: frame for cell, frame in self.handed_over.items() if frame.address.step >= step}
        self._portions.kept.committed(step)
        for cell_step in self.cells.values():
            if cell_step.step == step:
                cell_step.skip_evaluation()
                if cell_step.portions and cell_step.awaits_gradients:
                    self._run_alone(cell_step)
                self._finish_if_over(cell_step)

    # steps

    def begin(self, stage: int) -> None:
        """Start the next step of a stage's cells on its new state."""
        for cell_step in [one for one in self.cells.values() if one.cell.stage == stage]:
            self._begin(cell_step)
            self._gather_sums(cell_step)
        self._refresh_portions()

    def _refresh_portions(self, *, again: bool = False) -> None:
        """Refresh portions after a new plan or version, and give boundary tensors here to the cells that take them.

        again: portions begun here begin again, so that they lack their inputs.
        """
        frames = self._portions.refresh(self.steps)
        for cell in {cell for cell, _ in self._portions.steps if cell in self.cells}:
            inbox = self.cells[cell].inbox
            frames += [inbox.pop(address) for address in list(inbox) if is_of_microbatch(address)]
        for frame in frames:
            self.accept(frame)
        begun, self._portions.begun = self._portions.begun, []
        for portion in begun:
            self._ask_beside(portion, self._plan.current.cells(), again=again)

    def _begin(self, cell_step: CellStep) -> None:
        stage = self._states.stage(cell_step.cell.stage)
        if stage is None:
            return
        if cell_step.takeover and cell_step.step >= 0:
            self._complete_takeover(cell_step)
        if cell_step.done < len(cell_step.program):
            cell_step.since = (
                stage.values.version
            )  # others ran that step, or a later state came: this worker's log does not have it
        self._start(cell_step, stage)
        self._finish_if_over(cell_step)

    def _start(self, cell_step: CellStep, stage: Stage) -> None:
        tied_to, layout = self._states.tied_to(cell_step.cell), self._committer.layout(stage.values.version)
        left_out = layout is not None and cell_step.cell.pipeline >= layout.pipelines  # portions are of older steps
        over = left_out or stage.values.version <= self._committer.log.newest
        cell_step.portions = () if over else self._plan.current.at(cell_step.cell).portions
        if cell_step.portions:
            cell_step.since = stage.values.version + 1  # what the step sends is in the logs of all its runners
        evaluating = self._evaluating(stage.values.version)
        cell_step.start(stage, self._plan.stages, layout, tied_to, evaluating)

    def _run_alone(self, cell_step: CellStep) -> None:
        """Run the whole step from its start: no other worker continues it, or can send all its results."""
        self._start(cell_step, self._states.running(cell_step.cell))
        cell_step.since = cell_step.step
        self._outbox.resend(cell_step.cell, self._plan.worker)  # others send what they have when they are asked

    def _evaluating(self, step: int) -> Evaluating:
        """Return the evaluation with which the step begins; none if the step is committed and needs none."""
        if self._evaluations is None:
            return Evaluating()
        over = step in self._committer.log.commits
        return Evaluating(0 if over else self._evaluations.batches_of(step), only=step >= self.steps)

    def _finish_if_over(self, cell_step: CellStep) -> None:
        """Finish the cell if nothing is left to do for it, except to answer others."""
        held, step = self._states.of(cell_step.cell), cell_step.step
        if cell_step.finished or cell_step.work is None or held is None or step < self.steps:
            return
        if self._evaluations is None or step in self._committer.log.commits:
            cell_step.finished = True
            self._coordinator.tell(CellFinished(cell=cell_step.cell, digest=held.share_of_digest()))

    def ran(self) -> set[int]:
        """Return the stages whose step in progress is done here, except for its commit."""
        behind = {c.stage for c, cell_step in self.cells.items() if cell_step.next or cell_step.layout is None}
        return {c.stage for c in self.cells} - behind

    def of_state(self, number: int) -> list[CellStep]:
        """Return the steps of the cells that run on the state of that number."""
        return [cell_step for cell_step in self.cells.values() if cell_step.cell.stage == number]

    def active(self) -> tuple[CellStep, ...]:
        """Return the only cell that runs here, if not at its end; with several devices a stage's parts."""
        cell_steps = [cell_step for cell_step in self.cells.values() if cell_step.program]
        if len(cell_steps) > 1 and not self._plan.are_parts(one.cell for one in cell_steps):
            return ()
        return tuple(cell_step for cell_step in cell_steps if cell_step.step < self.steps)

    def cell_steps(self) -> Iterator[CellStep]:
        """Yield the steps of the cells and portions of cells that run here."""
        yield from self.cells.values()
        yield from self._portions.steps.values()

    def accept(self, frame: Frame) -> bool:
        """Keep a frame for a cell. Return False if the cell does not run here. Raises RefusedFrame for a misfit."""
        address = frame.address
        if is_of_microbatch(address) and self._portions.accept(frame):
            return True
        if address.cell in self.cells:
            self.cells[address.cell].accept(frame, self._states.stage(address.stage))
            if address.kind is FrameKind.PARTIAL_SUM:
                self._gather_sums(self.cells[address.cell])
        return address.cell in self.cells

    def keep(self, frame: Frame) -> bool:
        """Keep the sum of finished groups. Return False if it is not for this worker. Raises RefusedFrame."""
        kept, cell = self._portions.keep(frame), frame.address.cell
        if kept and cell in self.cells:
            self._gather_sums(self.cells[cell])
            self._refresh_portions()
        return kept

    def kept_all(self, frame: Frame) -> None:
        """Note that a cell's keeper has given all the sums that it has kept."""
        if self._portions.kept_all(frame.address):
            self._refresh_portions()

    # instructions

    def next_ready(self, only: type[object] = object) -> CellStep | None:
        """Return the cell whose next instruction is the most urgent that can run now. only: of that type."""
        if self._runnable is None:
            self._runnable = [one for one in self.cell_steps() if self._may_run(one)]
        ready = [one for one in self._runnable if one.next and isinstance(one.next, only) and self._is_ready(one)]
        if len(ready) > 1:
            return min(ready, key=lambda cell_step: cell_step.urgency)
        return ready[0] if ready else None

    def look_again(self) -> None:
        """Find anew which steps may run, after a change that is more than a boundary tensor."""
        self._runnable = None

    def _may_run(self, cell_step: CellStep) -> bool:
        """Return whether the step has instructions left that may run here, once their inputs are there."""
        if cell_step.next is None or cell_step.layout is None or cell_step.finished or cell_step.step > self._last:
            return False
        if self._committer.is_cut(cell_step.step):
            return False
        if self._plan.is_outdated and cell_step.step > self._committer.log.newest:
            return False
        if cell_step.is_portion and cell_step.step in self._committer.log.commits:
            return False
        if cell_step.predecessor is not None:
            if cell_step.step in self._committer.log.commits:
                return False  # its last gradients are on the way; repeating the step would be waste
            cell_step.predecessor = None
        return True

    def _is_ready(self, cell_step: CellStep) -> bool:
        if isinstance(cell_step.next, ReportReady):
            if cell_step.figures is not None and not cell_step.figures.ready():
                return False
            strict = cell_step.step < self.steps and self._must_not_be_repeated(cell_step)
            return not self._replicator.holds_back(cell_step.cell, cell_step.step, strict)
        return cell_step.has_inputs

    def _must_not_be_repeated(self, cell_step: CellStep) -> bool:
        """Return whether workers that would have to repeat the cell's step might lack frames of another lost cell.

        The log of what several cells sent each other is lost with their owner, unless they are parts of one stage,
        which one heir has at one version; the same is true if two owners are lost at once.
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
        """Run the cell's next instruction, which is ready."""
        instruction = cell_step.next
        assert instruction is not None
        name, microbatch = type(instruction).__name__, getattr(instruction, "microbatch", 0)
        if cell_step.takeover:
            inputs = [cell_step.inbox[a] for a in cell_step.inputs[cell_step.done]]
            first = not isinstance(instruction, AddPartialSums)
            if first and inputs and not any(f.again or self._is_repeated_here(f.address) for f in inputs):
                self._complete_takeover(cell_step)  # these were never sent to the one before: no repetition follows
            elif first:
                cell_step.takeover.count(instruction)
            else:
                cell_step.takeover.repeated_elsewhere(self._portions.elsewhere(cell_step))
        elif taken := self._shared_takeover(cell_step):
            taken.count(instruction)
        begun, stage = self._timer.now(), self._states.stage(cell_step.cell.stage)
        given = self._devices.begin(stage) if stage is not None and stage.runs_ahead else None
        self._observer.started(name, cell_step.cell, cell_step.step, microbatch)
        ordinary = self._is_ordinary(cell_step)
        by_layer = ordinary and self._is_run_by_layer(cell_step, stage)
        if by_layer and isinstance(instruction, Forward):
            self._instructions.forward_by_layer(cell_step, instruction, self._timer)
        else:
            self._instructions.execute(cell_step, instruction)
        cell_step.done += 1
        self.backwards += isinstance(instruction, Backward)
        self._observer.finished(name, cell_step.cell, cell_step.step, microbatch)
        whole, took = ordinary and not by_layer, partial(self._timer.ran, cell_step.cell.stage, instruction)
        if given:
            self._devices.end(given, took if whole else None)
        elif whole:
            took(self._timer.now() - begun)
        if cell_step.takeover:
            cell_step.takeover.until = self._clock()
            if cell_step.next is None:
                self._complete_takeover(cell_step)  # the cell may move on with the commit

    def _shared_takeover(self, portion: CellStep) -> TakeoverProgress | None:
        """Return the takeover that a portion belongs to, if this worker owns its cell."""
        owned = self.cells.get(portion.cell) if portion.is_portion else None
        return owned.takeover if owned else None

    def _is_repeated_here(self, address: Address) -> bool:
        """Return whether a frame comes from another part of the stage that is taken over together with its receiver."""
        cell, behind = address.cell, address.kind is FrameKind.GRADIENT
        source = Cell(cell.pipeline, cell.stage + (1 if behind else -1))
        if self._plan.devices == 1 or source not in self.cells or not self._plan.are_parts((cell, source)):
            return False
        return self.cells[source].takeover is not None

    def _is_ordinary(self, cell_step: CellStep) -> bool:
        """Return whether the next instruction is no repetition, and belongs to no takeover."""
        return cell_step.takeover is None and cell_step.step > self._committer.log.newest

    def _is_run_by_layer(self, cell_step: CellStep, stage: Stage | None) -> bool:
        if not isinstance(cell_step.next, Forward) or stage is None or not stage.has_run:
            return False  # a stage's first forward is checked
        if self._spots.wants(cell_step, cell_step.next.microbatch):
            return False  # it is run layer by layer for another reason
        return self._timer.begins_forward(cell_step.cell.stage)

    def _complete_takeover(self, cell_step: CellStep) -> None:
        takeover, cell_step.takeover = cell_step.takeover, None
        assert takeover is not None
        stage, plan = self._states.stage(cell_step.cell.stage), self._plan.current
        if stage is not None and stage.runs_ahead and (takeover.forwards or takeover.backwards):
            stage.wait()  # for what is repeated, once: until then the device kept the order
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
        """Return whether no step of that cell's state, and no takeover, has anything left to do here."""
        mine = [cell_step for cell_step in self.cells.values() if cell_step.cell.stage == cell.stage]
        return all(c.next is None for c in mine) and not any(c.takeover for c in self.cells.values())

    # what others ask

    def repeated(self) -> Iterator[Repeated]:
        """Yield the committed steps repeated here, without a predecessor that would still send their results."""
        for cell_step in self.cells.values():
            committed = cell_step.step in self._committer.log.commits and cell_step.step < self.steps
            number = cell_step.cell.stage
            if not cell_step.program or not committed or self._states.has_final(number, cell_step.step):
                continue
            if cell_step.predecessor is None:
                yield Repeated(cell_step.cell, cell_step.step, cell_step.lacking())

    def since(self) -> dict[Cell, int]:
        """Return the first step in this worker's log, for each of its cells."""
        return {cell_step.cell: cell_step.since for cell_step in self.cells.values()}

    def report(self) -> None:
        """Report finished cells to the coordinator again."""
        for cell_step in self.cells.values():
            held = self._states.of(cell_step.cell)
            if cell_step.finished and held:
                self._coordinator.tell(CellFinished(cell=cell_step.cell, digest=held.share_of_digest()))

    def waits_for(self) -> str:
        """Return why there is no work right now, as text for the user."""
        if self._committer.is_cut(self._committer.log.newest + 1):
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
