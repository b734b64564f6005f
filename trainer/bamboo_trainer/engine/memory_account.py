"""What this worker's memory is used for: the account, and when it is taken."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from bamboo_core.control.memory import Memory
from bamboo_core.planning.schedule import Backward
from bamboo_trainer.engine.steps.cell_step import CellStep, Shadow
from bamboo_trainer.engine.steps.executor import Executor
from bamboo_trainer.engine.steps.redundant_work import RedundantWork
from bamboo_trainer.frames.frame import Frame
from bamboo_trainer.memory.saved_tensors import ContextSize, new_bytes
from bamboo_trainer.routing.message_log import MessageLog
from bamboo_trainer.stage.stage_states import StageStates
from bamboo_trainer.stage.work import Work

TOLD_SECONDS = 1.0


class MemoryMeter:
    """Takes the account three times in a step, where it is highest, and keeps the larger number of each kind.

    Not of every step: it is told once a second at most, so the first step is measured that begins a second after the
    one before. latest: of the newest measured step that is over here.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.latest: Memory | None = None
        self._clock = clock
        self._step, self._highest = -1, Memory()
        self._measures, self._next = False, 0.0  # this step; the next one not before
        self._due = 0.0

    def due(self, now: float) -> Memory | None:
        """The latest account, at most once a second; from any one thread."""
        if self.latest is None or now < self._due:
            return None
        self._due = now + TOLD_SECONDS
        return self.latest

    def wants(self, cell_step: CellStep) -> bool:
        """Is the account to be taken now that an instruction of a cell is done?

        Before its first backward most microbatches are in flight, and most cells have to wait then; before its last one
        most sums of gradients are apart. When its last instruction is done, the log and what was computed in advance
        are complete.
        """
        if cell_step.step != self._step:
            self._begin(cell_step.step)
        if not self._measures or cell_step.next is None:
            return self._measures
        return isinstance(cell_step.next, Backward) and cell_step.place in cell_step.outer_backwards

    def take(self, account: Memory, *, over: bool) -> None:
        """over: the step is."""
        self._highest = self._highest.highest(account)
        if over:
            self.latest = self._highest

    def _begin(self, step: int) -> None:
        now = self._clock()
        self._step, self._highest, self._measures = step, Memory(), now >= self._next
        if self._measures:
            self._next = now + TOLD_SECONDS

    def changed(self, step: int, account: Memory) -> None:
        """A new plan, or an optimizer step, on a worker that runs no cell: it has no other occasion."""
        if step != self._step:
            self._step, self._highest = step, Memory()
        self.take(account, over=True)


class Beside(NamedTuple):
    """What is beside the parts. early: frames for parts that this worker does not have yet. copies: of layers."""

    early: Iterable[Frame]
    copies: Iterable[Tensor]


def account(
    states: StageStates, executor: Executor, redundant: RedundantWork, log: MessageLog, beside: Beside
) -> Memory:
    """Every storage counts once. What autograd keeps cannot be seen: it counts as in each stage's first forward, but
    not while it is in host memory.
    """
    seen: set[int] = set()
    held = [(index, s.owned, s.stage.values.state_bytes()) for index, s in states.by_stage.items() if s.stage]
    run = {index for index, owned, _ in held if owned}
    parameters = sum(size for _, owned, (size, _) in held if owned)
    works = [(cell_step.cell.stage, cell_step.work) for cell_step in executor.cell_steps() if cell_step.work]
    adopted = [cell_step.ahead for cell_step in executor.cells.values() if cell_step.ahead]
    shadows = [*redundant.shadows.values(), *adopted]
    final = (t for state in states.by_stage.values() for parts in state.final.values() for t in parts)
    frames = [
        *(f for cell_step in executor.cells.values() for f in cell_step.inbox.values()),
        *beside.early,
        *redundant.mirrored.values(),
    ]
    return Memory(  # in this order, as what has been seen does not count again
        parameters=parameters + sum(_context(states, index).casts for index in run),
        optimizer=sum(remembered for _, owned, (_, remembered) in held if owned),
        replica=sum(size + remembered for _, owned, (size, remembered) in held if not owned),
        gradients=new_bytes(executor.gradients(), seen) + new_bytes(final, seen),
        log=new_bytes(log.tensors(), seen),
        activations=new_bytes((t for _, work in works for t in _contexts(work)), seen)
        + sum((work.contexts_here + len(work.postponed)) * _context(states, stage).here for stage, work in works),
        redundant=new_bytes((t for shadow in shadows for t in _in_advance(shadow)), seen)
        + sum(_redundant_contexts(shadow, states, works) for shadow in shadows),
        received=new_bytes((t for frame in frames for t in frame.tensors), seen),
        copies=new_bytes(beside.copies, seen),
    )


def _context(states: StageStates, index: int) -> ContextSize:
    """What a microbatch of the stage of that number keeps for its backward, if the stage is run here and has measured
    it; else the default.
    """
    stage = states.stage(index)
    return (stage.context if stage else None) or ContextSize()


def _redundant_contexts(shadow: Shadow, states: StageStates, works: Iterable[tuple[int, Work]]) -> int:
    """A forward that is begun counts as done."""
    size = _context(states, shadow.cell.stage)
    adopted = any(work is shadow.work for _, work in works)  # then they are activations
    count = len(shadow.forwardings) + (0 if adopted else len(shadow.work.contexts))
    return count * size.here + (size.casts if count and not adopted else 0)


def _contexts(work: Work) -> Iterator[Tensor]:
    for inputs, outputs in work.contexts.values():
        yield from inputs
        yield from outputs
    for rest in work.postponed.values():
        yield from rest.tensors()


def _in_advance(shadow: Shadow) -> Iterator[Tensor]:
    yield from shadow.work.gradients.tensors()
    yield from _contexts(shadow.work)
    for forwarding in shadow.forwardings.values():
        yield from forwarding.leaves
        yield from forwarding.parts
    for done in (shadow.outputs, shadow.gradients):
        for parts in done.values():
            yield from parts
    for handed in (*shadow.given.values(), *shadow.returned.values()):
        yield from handed.parts
