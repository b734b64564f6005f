"""What a cell's shadow computes in advance while it would wait: forwards (FRC), and in one mode backwards (BRC).

The shadow is the worker of the stage before: it has the lost stage's inputs, because it made them. In `EagerForward` a
layer is run only if the expected bubble has room for it (see `bubble_budget`), so that no critical instruction is
delayed; in `EagerBackward` everything is run whenever the worker is idle, as the published system does. What is there
when the shadow takes over is used; the rest is computed then.

A worker with several devices does so on each: beside each part of its own stage it has the part of the next stage that
is on the same device. What these parts give each other they get from what has been computed of each other in advance.

Where devices run ahead of the host, bubbles are those of each device (`device_times`). It is given one piece at a time,
when it has nothing left to do and all that the piece takes is there, and the host does not wait for it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from bamboo_core.job.spec import RedundancyMode
from bamboo_core.planning.plan import Cell, Layout
from bamboo_core.planning.schedule import Backward, Forward, one_f_one_b
from bamboo_core.planning.splits.devices import EAGER
from bamboo_trainer.engine.observer import Observer
from bamboo_trainer.engine.stage_times import StageTimer
from bamboo_trainer.engine.steps.bubble_budget import BubbleBudget, Slot
from bamboo_trainer.engine.steps.cell_step import CellStep, MadeParts, Shadow
from bamboo_trainer.engine.steps.device_times import BegunWork, DeviceTimes, Took
from bamboo_trainer.frames.frame import Address, Frame, FrameKind
from bamboo_trainer.memory.host_copies import HostCopies
from bamboo_trainer.memory.marks import QueueMark
from bamboo_trainer.routing.message_log import MessageLog
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.stage_states import StageStates
from bamboo_trainer.task import Parts


class RedundantWork:
    """shadows: by the cell. mirrored: gradients for cells that this worker shadows."""

    def __init__(
        self,
        plan: PlanState,
        log: MessageLog,
        states: StageStates,
        observer: Observer,
        clock: Callable[[], float],
        timer: StageTimer,
        devices: DeviceTimes,
        copies: HostCopies,
        *,
        on_host: bool,
    ) -> None:
        self._plan, self._log, self._states = plan, log, states
        self._observer, self._clock, self._timer = observer, clock, timer
        self._copies, self._on_host = copies, on_host
        self._devices = devices
        self.shadows: dict[Cell, Shadow] = {}
        self.mirrored: dict[Address, Frame] = {}
        self.budget = BubbleBudget()
        self._idle_since: float | None = None
        self._disturbed: int | None = None  # the step in which roles have changed
        self._rehearsed: dict[tuple[Cell, int], Parts] = {}  # by part and step, what the one before gave in a rehearsal
        self._waits: dict[Slot, float] = {}  # of parts, that another part's instruction has ended

    # what happens elsewhere

    def take_roles(self, step: int, *, first: bool) -> None:
        """The plan in force is new; it came in that step. first: of the job."""
        self.budget.restart(step)
        self._devices.forget()
        self._waits.clear()
        self._disturbed = None if first else step
        worker, plan = self._plan.worker, self._plan.current
        kept = {c for c in plan.replicated_by(worker) if plan.at(c).shadow == worker}
        self.shadows = {c: shadow for c, shadow in self.shadows.items() if c in kept}

    def wants(self, frame: Frame) -> bool:
        """Is the frame for a cell that is shadowed here? With a newer plan this worker may be its owner: it waits."""
        plan, cell = self._plan.current, frame.address.cell
        return frame.epoch <= plan.epoch and cell in plan.cells() and plan.at(cell).shadow == self._plan.worker

    def keep(self, frame: Frame) -> None:
        self.mirrored[frame.address] = frame

    def drop(self, stage: int) -> None:
        """The state of that stage has changed."""
        self.shadows = {c: shadow for c, shadow in self.shadows.items() if c.stage != stage}

    def committed(self, step: int) -> None:
        self.mirrored = {a: frame for a, frame in self.mirrored.items() if a.step > step}

    # waits

    @property
    def works_ahead(self) -> bool:
        """Is something computed in advance under the plan in force?"""
        return self._plan.current.mode in EAGER

    def begin_wait(self) -> None:
        """Nothing that must be done is ready."""
        if self._idle_since is None:
            self._idle_since = self._clock()
            self._observer.event("Idle")

    def end_wait(self, waiting: CellStep, beside: Iterable[CellStep], until: float) -> None:
        """The cell's next instruction, or the commit of its step, has come. beside: the other parts of its stage, which
        have waited, too, and wait on. Of several such waits of a part the shortest counts: a layer must fit into one.
        """
        stage = self._states.stage(waiting.cell.stage)
        if self.budget.measures(waiting.step) and not (stage and stage.runs_ahead):
            idle, slot = self._idle(until), (waiting.cell, waiting.place)
            for one in beside if idle else ():
                other = (one.cell, one.place)
                self._waits[other] = min(idle, self._waits.get(other, idle))
            shortest = self._waits.pop(slot, idle)
            self.budget.waited(slot, min(shortest, idle or shortest))
        self._idle_since = None

    def _idle(self, until: float) -> float:
        return until - self._idle_since if self._idle_since is not None else 0.0

    # one piece of work

    def turn(self, active: Sequence[CellStep]) -> bool:
        """Run one piece of redundant work, if there is one that may run now. active: the one stage that is run here, in
        its parts.
        """
        self._devices.collect()
        shadowed = [(one, *found) for one in active if (found := self._shadowed(one))]
        for one, cell, stage in reversed(shadowed):
            if self._rehearse(one, cell, stage) or self._work(active, one, cell, stage):
                return True
        return False

    def _shadowed(self, active: CellStep) -> tuple[Cell, Stage] | None:
        """The cell of the next stage that is on the active one's device, and its stage as it is before that step; None
        if nothing can be run of it.
        """
        plan = self._plan.current
        if plan.mode is RedundancyMode.NONE:
            return None
        (d, s), devices = active.cell, self._plan.devices
        cell = Cell(d, (s + devices) % len(plan.stages))  # the next one in the ring
        if cell == active.cell or plan.at(cell).shadow != self._plan.worker:
            return None
        stage = self._states.stage(cell.stage)
        if stage is None or stage.values.version != active.step or active.layout is None:
            return None
        if self._states.has_final(cell.stage, active.step):
            return None  # the cell has finished the step: nothing of it will be repeated
        return cell, stage

    def _rehearse(self, active: CellStep, cell: Cell, stage: Stage) -> bool:
        """Once, before it matters: what runs for the first time is slow, and must not be so in a takeover.

        Not in a step in which roles have changed: others may wait for what this worker is about to repeat.
        """
        if self._states.by_stage[cell.stage].rehearsed or self.budget.measures(active.step) or active.layout is None:
            return False
        if active.step == self._disturbed:
            return False
        microbatch = active.layout.split[cell.pipeline][0]
        given = self._rehearsed.pop((cell, active.step), None)
        if self._inputs_known(cell, active.step, microbatch):
            given = self._inputs(cell, active.step, microbatch)
        elif given is None:
            return False
        outputs = self._run_rehearsal(stage, (cell, active.step, microbatch), given)
        if self._gives_part(cell):
            self._rehearsed = {(_after(cell), active.step): tuple(part.cpu() for part in outputs)}
        return True

    def _run_rehearsal(self, stage: Stage, place: tuple[Cell, int, int], inputs: Parts | None) -> Parts:
        self._states.begin_rehearsal(place[0].stage)
        self._observer.started("Rehearsal", *place)
        given = self._devices.begin(stage) if stage.runs_ahead else None
        outputs = stage.rehearse(*place[1:], inputs)
        if given:
            self._devices.end(given)
        self._observer.finished("Rehearsal", *place)
        return outputs

    def _work(self, active: Sequence[CellStep], one: CellStep, cell: Cell, stage: Stage) -> bool:
        """Does some redundant work of a cell, beside that one of the active ones, if there is any to do."""
        assert one.layout is not None
        mode, shadow = self._plan.current.mode, self.shadows.get(cell)
        if mode is RedundancyMode.LAZY_FORWARD or self.budget.measures(one.step):
            return False
        if stage.runs_ahead and self._devices.busy(cell.stage):
            return False  # its device says when it is done
        if shadow is None or shadow.step != one.step or shadow.layout != one.layout:
            shadow = self.shadows[cell] = Shadow.begin(cell, one.step, one.layout, stage)
        if mode is RedundancyMode.EAGER_BACKWARD:
            return self._mirror(shadow, stage)
        return self._fill(active, one, shadow, stage)

    def _fill(self, active: Sequence[CellStep], one: CellStep, shadow: Shadow, stage: Stage) -> bool:
        """One layer of the first forward that is not done yet, if it fits into the bubble."""
        microbatches = shadow.layout.split[shadow.cell.pipeline]
        microbatch = next((m for m in microbatches if m not in shadow.outputs), None)
        if microbatch is None or not self._inputs_known(shadow.cell, shadow.step, microbatch):
            return False
        forwarding = shadow.forwardings.get(microbatch)
        layer = forwarding.layer if forwarding else stage.values.first
        now = self._clock()
        waiting = [one] if stage.runs_ahead else active  # the host waits, and with it all devices
        if not all(self._fits(each, now, shadow.cell.stage, layer) for each in waiting):
            return False
        self._advance(shadow, stage, microbatch)
        if not stage.runs_ahead:
            self.budget.ran_layer(shadow.cell.stage, layer, self._clock() - now)
        return True

    def _fits(self, one: CellStep, now: float, stage: int, layer: int) -> bool:
        """Is there room for a layer while that part waits for its next instruction?"""
        own = self._states.running(one.cell)
        idle = self._devices.idle(one.cell.stage) if own.runs_ahead else self._idle(now)
        return self.budget.fits((one.cell, one.place), idle, stage, layer)

    def _advance(self, shadow: Shadow, stage: Stage, microbatch: int) -> None:
        cell = shadow.cell
        self._observer.started("RedundantForward", cell, shadow.step, microbatch)
        given = self._devices.begin(stage, with_inputs=True) if stage.runs_ahead else None
        if microbatch not in shadow.forwardings:
            inputs = self._inputs(cell, shadow.step, microbatch)
            shadow.forwardings[microbatch] = stage.start(shadow.step, microbatch, inputs, self._on_host)
        forwarding = shadow.forwardings[microbatch]
        layer = forwarding.layer
        if self._on_host:
            stage.settle()
        with self._devices.measuring(stage, self._timer.now, partial(self._timer.ran_layer, cell.stage, layer)):
            stage.advance(forwarding)
        if forwarding.done:
            shadow.outputs[microbatch] = stage.complete(shadow.work, shadow.forwardings.pop(microbatch))
        made = self._ended(given, lambda seconds, _: self.budget.ran_layer(cell.stage, layer, seconds))
        if forwarding.done and self._gives_part(cell):
            shadow.given[microbatch] = MadeParts(self._copies.hand_over(shadow.outputs[microbatch]), made)
        self._observer.finished("RedundantForward", cell, shadow.step, microbatch)

    def _ended(self, given: BegunWork | None, took: Took | None = None) -> QueueMark | None:
        """The mark behind a piece of redundant work that a device was given; None if it does not run ahead."""
        return self._devices.end(given, took, scheduled=False, tells=True) if given else None

    def _mirror(self, shadow: Shadow, stage: Stage) -> bool:
        """The next forward or backward in the cell's own order: its gradients must be summed in that order, too."""
        match self._next_mirrored(shadow.cell, shadow.step, shadow.layout, shadow):
            case Forward(m):
                self._advance(shadow, stage, m)
                return True
            case Backward(m):
                return self._backward(shadow, stage, m, last=stage.values.last)
            case _:
                return False

    def _next_mirrored(self, cell: Cell, step: int, layout: Layout, shadow: Shadow | None) -> Forward | Backward | None:
        """None: all is done, or what it takes is not here. shadow: what is done of it."""
        (d, s), stages = cell, self._plan.stages
        for instruction in one_f_one_b(s, stages, layout.split[d]):
            m = instruction.microbatch
            if isinstance(instruction, Forward) and not (shadow and m in shadow.outputs):
                return instruction if self._inputs_known(cell, step, m) else None
            if isinstance(instruction, Backward) and not (shadow and m in shadow.gradients):
                known = s == stages - 1 or self._gradients(cell, step, m) is not None
                return instruction if known else None
        return None

    def _backward(self, shadow: Shadow, stage: Stage, m: int, *, last: bool) -> bool:
        gradients = None if last else self._gradients(shadow.cell, shadow.step, m)
        if gradients is None and not last:
            return False
        self._observer.started("RedundantBackward", shadow.cell, shadow.step, m)
        given = self._devices.begin(stage, with_inputs=True) if stage.runs_ahead else None
        shadow.gradients[m] = stage.backward(shadow.work, shadow.step, m, gradients)
        made = self._ended(given)
        if self._takes_part(shadow.cell):
            shadow.returned[m] = MadeParts(self._copies.hand_over(shadow.gradients[m]), made)
        self._observer.finished("RedundantBackward", shadow.cell, shadow.step, m)
        return True

    def _gradients(self, cell: Cell, step: int, microbatch: int) -> Parts | None:
        """The gradients of the cell's outputs; None if they are not here, or if the loss is what its backward begins
        with.
        """
        if self._gives_part(cell):
            behind = self.shadows.get(_after(cell))
            returned = behind.returned.get(microbatch) if behind and behind.step == step else None
            return self._there(returned)
        address = Address(FrameKind.GRADIENT, *cell, step, microbatch)
        frame = self.mirrored.get(address) or self._log.get(address)
        return frame.tensors if frame else None

    def _inputs_known(self, cell: Cell, step: int, microbatch: int) -> bool:
        return cell.stage == 0 or self._inputs(cell, step, microbatch) is not None

    def _inputs(self, cell: Cell, step: int, microbatch: int) -> Parts | None:
        if self._takes_part(cell):
            before = self.shadows.get(_before(cell))
            given = before.given.get(microbatch) if before and before.step == step else None
            return self._there(given)
        frame = self._log.get(Address(FrameKind.ACTIVATION, *cell, step, microbatch))
        return frame.tensors if frame else None

    def _there(self, handed: MadeParts | None) -> Parts | None:
        """What another device has handed over, once it is made: else the one that takes it would wait, and so would
        what the schedule has for it next.
        """
        return handed.parts if handed and (handed.made is None or handed.made.done()) else None

    def _gives_part(self, cell: Cell) -> bool:
        """Do its outputs go to another part of its stage?"""
        return self._plan.are_parts((cell, _after(cell)))

    def _takes_part(self, cell: Cell) -> bool:
        """Do its inputs come from another part of its stage?"""
        return cell.stage > 0 and self._plan.are_parts((_before(cell), cell))


def _after(cell: Cell) -> Cell:
    return Cell(cell.pipeline, cell.stage + 1)


def _before(cell: Cell) -> Cell:
    return Cell(cell.pipeline, cell.stage - 1)
