"""A cell's work on one step: its instructions, and the frames that they need."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from bamboo_core.planning.cell_portions import Range, ranges
from bamboo_core.planning.plan import Cell, Layout, Portion, WorkerId
from bamboo_core.planning.schedule import (
    AddPartialSums,
    Backward,
    BackwardRest,
    BackwardWeight,
    Computed,
    Evaluate,
    Forward,
    GatherGradients,
    Instruction,
    ReduceGradients,
    ReportReady,
    SendPartialSum,
    StageOrder,
    SumTied,
    evaluation,
    portion_program,
    program,
)
from bamboo_trainer.frames import EVALUATED, Address, Frame, FrameKind
from bamboo_trainer.memory.host_copies import Copy
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.work import Work, resume


def needs(
    instruction: Instruction, cell: Cell, stages: int, layout: Layout, step: int, tied_stages: Sequence[int]
) -> tuple[Address, ...]:
    """Return the addresses of the frames that must arrive before the instruction can run. tied_stages: the other stages
    that share the cell's tied parameters."""
    d, s = cell
    match instruction:
        case Forward(m) if s > 0:
            return (Address(FrameKind.ACTIVATION, d, s, step, m),)
        case Evaluate(m) if s > 0:
            return (Address(FrameKind.ACTIVATION, d, s, step, m, EVALUATED),)
        case Backward(m) if s < stages - 1:
            return (Address(FrameKind.GRADIENT, d, s, step, m),)
        case AddPartialSums(portions):
            return tuple(Address(FrameKind.PARTIAL_SUM, d, s, step, first, end) for first, end in portions)
        case ReduceGradients(bucket):
            others = (node for e in range(layout.pipelines) if e != d for node in layout.sums(e))
            return tuple(Address(FrameKind.CONTRIBUTION, d, s, step, bucket, node.first) for node in others)
        case GatherGradients(buckets):
            chunks = ((b, e) for b in range(buckets) for e in range(layout.pipelines) if e != d)
            return tuple(Address(FrameKind.RESULT, d, s, step, b, e) for b, e in chunks)
        case SumTied():
            return tuple(Address(FrameKind.TIED, d, s, step, 0, t) for t in tied_stages)
        case _:
            return ()


@dataclass(slots=True)
class TakeoverProgress:
    """Times and repeated work of a takeover in progress.

    arrived: when the plan came or, if it waited for a commit, when that was recorded. applied: when it came into force.
    until: when the last repetition ended, at first `applied`. In clock seconds. forwards, backwards: numbers repeated.
    """

    arrived: float
    applied: float
    until: float
    forwards: int = 0
    backwards: int = 0

    def count(self, instruction: Instruction) -> None:
        self.forwards += isinstance(instruction, Forward)
        self.backwards += isinstance(instruction, Backward)

    def repeated_elsewhere(self, microbatches: int) -> None:
        """Count a forward and a backward for each microbatch that other workers ran. microbatches: their number."""
        self.forwards += microbatches
        self.backwards += microbatches


@dataclass(slots=True)
class CellStep:
    """A cell's work on one step, or the work on one portion of it.

    predecessor: the worker that ran the cell before, while it may owe this worker its last gradients. inputs: the
    addresses of each instruction's input frames. since: the first step in which this worker logged the frames that the
    cell sent. in_midstep: this worker took the cell over within a step and has not started that step; others wait for
    it. evaluations: number of instructions at the program's beginning that evaluate the state, before the step itself.
    figures: results to report, once computed: the squared norms of the final gradient, and the losses. portions: the
    cell's portions; () if its owner runs all its microbatches. is_portion: this is the work on one portion, and the
    cell's owner may be another worker. kept: the end of the microbatches whose sums were sent to the keeper; 0: none.

    passed: receiver and address of each KEPT_SUM frame passed on to the keeper, and of each SUMMED frame. again: the
    work on each microbatch that runs only for neighbouring stages, because its gradient needs no summing any more.
    """

    cell: Cell
    step: int = -1
    layout: Layout | None = None
    program: list[Instruction] = field(default_factory=list)
    inputs: list[tuple[Address, ...]] = field(default_factory=list)
    done: int = 0
    work: Work | None = None
    final: Tensor | None = None
    figures: Copy | None = None
    inbox: dict[Address, Frame] = field(default_factory=dict)
    consumed: set[Address] = field(default_factory=set)
    predecessor: WorkerId | None = None
    takeover: TakeoverProgress | None = None
    finished: bool = False
    since: int = 0
    in_midstep: bool = False
    evaluations: int = 0
    portions: tuple[Portion, ...] = ()
    is_portion: bool = False
    kept: int = 0
    passed: set[tuple[WorkerId, Address]] = field(default_factory=set)
    again: dict[int, Work] = field(default_factory=dict)

    @classmethod
    def of_portion(
        cls,
        cell: Cell,
        stages: int,
        layout: Layout,
        portion: Range,
        stage: Stage,
        left: int,
        kept: Sequence[Frame],
        again: Collection[int],
    ) -> Self:
        """Return the work on a portion of a cell, which another worker may own, in the step at the stage's version.

        left: the first microbatch whose gradient is to be summed; the portion's end if none is. kept: the sums of the
        microbatches before it, if they are to be sent. again: microbatches before it that run for neighbouring stages.
        """
        step, order = stage.values.version, StageOrder(layout.schedule)
        program: list[Instruction] = [*portion_program(cell.stage, stages, portion, order, left, again)]
        work = None
        if left < portion[1] or kept:
            program.append(SendPartialSum(portion))
            work = stage.begin(range(*portion), layout.bounds)
            for frame in kept:
                resume(work, (frame.address.microbatch, frame.address.part), frame.payload, frame.tensors)
        inputs = [needs(one, cell, stages, layout, step, ()) for one in program]
        repeated = {m: stage.begin([m], [m, m + 1]) for m in again}
        return cls(cell, step, layout, program, inputs, work=work, is_portion=True, again=repeated)

    def start(
        self,
        stage: Stage,
        stages: int,
        layout: Layout | None,
        tied_to: Sequence[int],
        evaluations: int = 0,
        *,
        only_evaluates: bool = False,
    ) -> None:
        """Start the step that the stage's values are ready for (`version`), at its first instruction. layout: None if
        the plan with the step's layout has not come yet; the step waits for it.

        tied_to: the other stages that share parameters with this one. evaluations: number of batches that all pipelines
        together evaluate before the step. only_evaluates: the step trains nothing.
        """
        self.step, self.layout, self.done, self.kept = stage.values.version, layout, 0, 0
        self.final = self.figures = None
        active = layout is not None and self.cell.pipeline < layout.pipelines
        self.program, self.evaluations = [], 0
        resumed, self.in_midstep = self.in_midstep, self.in_midstep and layout is None
        if layout and active:
            before = evaluation(self.cell, layout, evaluations)
            shared, tied = self._ranges(layout), bool(stage.values.tied)
            order = StageOrder(layout.schedule, late_weights=resumed)
            training = program(self.cell, stages, layout, tied, order, shared, len(stage.values.buckets))
            step = [ReportReady()] if only_evaluates else training
            self.program, self.evaluations = [*before, *step], len(before)
        self.inputs = [needs(one, self.cell, stages, layout, self.step, tied_to) for one in self.program if layout]
        self.work = None
        if layout and active:
            bucketwise = any(isinstance(one, BackwardRest) for one in self.program)
            self.work = stage.begin(layout.split[self.cell.pipeline], layout.bounds, bucketwise=bucketwise)
        self.inbox = {a: f for a, f in self.inbox.items() if a.step >= self.step}
        self.consumed.clear()
        self.passed.clear()

    def await_sums(self, microbatches: Sequence[Range], stages: int) -> None:
        """Set the ranges of microbatches whose sums the owner of a shared cell adds up, unless it has added them."""
        place = next((i for i, one in enumerate(self.program) if isinstance(one, AddPartialSums)), -1)
        if self.layout and place >= self.done:
            self.program[place] = one = AddPartialSums(tuple(microbatches))
            self.inputs[place] = needs(one, self.cell, stages, self.layout, self.step, ())

    def _ranges(self, layout: Layout) -> tuple[Range, ...]:
        portions = ranges(layout, self.cell.pipeline, self.portions) if self.portions else ()
        return tuple(microbatches for _, microbatches in portions)

    @property
    def awaits_gradients(self) -> bool:
        """Whether forwards, backwards or the addition of the portions' sums are left in the program."""
        return any(isinstance(i, Computed | AddPartialSums) for i in self.program[self.done :])

    def is_ordinary(self, newest: int) -> bool:
        """Return whether the step is uncommitted, and no takeover is in progress. newest: the newest committed step."""
        return self.takeover is None and self.step > newest

    def skip_evaluation(self) -> None:
        """Skip the rest of the evaluation before a committed step: its results are already in the commit."""
        left = max(0, self.evaluations - self.done)
        del self.program[self.done : self.done + left], self.inputs[self.done : self.done + left]
        self.evaluations -= left

    def accept(self, frame: Frame) -> None:
        """Keep a frame of this step or a later one, unless a copy of it is here or has been taken."""
        address = frame.address
        if address.step >= self.step and address not in self.consumed:
            self.inbox.setdefault(address, frame)

    def lacking(self, end: int | None = None) -> list[Address]:
        """Return the addresses of missing input frames of the instructions from the next one on. end: the index of the
        instruction to stop before; None for the program's end.
        """
        inputs = self.inputs[self.done : end]
        return [address for addresses in inputs for address in addresses if address not in self.inbox]

    @property
    def has_inputs(self) -> bool:
        """Whether all input frames of the next instruction have arrived."""
        return self._has_inputs_of(self.done)

    def _has_inputs_of(self, place: int) -> bool:
        """Return whether all input frames of the program's instruction at this place have arrived."""
        return all(address in self.inbox for address in self.inputs[place])

    def take_input(self) -> Frame | None:
        """Remove the next instruction's only input frame from the inbox, and return it; None if it needs no frame."""
        addresses = self.inputs[self.done]
        return self.take(addresses[0]) if addresses else None

    def take(self, address: Address) -> Frame:
        self.consumed.add(address)
        return self.inbox.pop(address)

    @property
    def next(self) -> Instruction | None:
        return self.program[self.done] if self.done < len(self.program) else None

    @property
    def urgency(self) -> tuple[int, bool, int, int]:
        """The rank of the next instruction among this worker's cells; the smallest runs first: the oldest step, then
        portions of cells, then other instructions before forwards, then later stages.

        No other stage waits for weight gradients, so they rank last in a step, unless the work behind them in the
        program has its inputs: then they rank like that work, which they delay.
        """
        place, end = self.done, len(self.program)
        while place < end and isinstance(self.program[place], BackwardWeight):
            place += 1
        if place == end or (place > self.done and not self._has_inputs_of(place)):
            return (self.step, True, 2, -self.cell.stage)
        return (self.step, not self.is_portion, int(isinstance(self.program[place], Forward)), -self.cell.stage)

    def final_gradient(self) -> Tensor:
        """Return the stage's gradient, [gradient_size], summed over the pipelines; with several, only after
        `GatherGradients`. `SumTied` adds up the gradients of tied parameters in its first `size` elements.
        """
        assert self.work is not None
        if self.final is None:
            self.final = self.work.gradients.total()
        return self.final
