"""What this worker's memory is used for: the account, and when it is taken."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from bamboo.memory import Memory
from bamboo_trainer.engine.schedule import Backward
from bamboo_trainer.stage.saved_tensors import ContextSize, new_bytes

if TYPE_CHECKING:
    from bamboo_trainer.engine.cell_step import Run
    from bamboo_trainer.engine.engine import Engine
    from bamboo_trainer.engine.redundant_work import Shadow
    from bamboo_trainer.stage.stage import Work


TOLD_SECONDS = 1.0


class Meter:
    """Takes the account twice in a step, where it is highest, and keeps the larger number of each kind.

    latest: of the newest step that is over here.
    """

    def __init__(self) -> None:
        self.latest: Memory | None = None
        self._step, self._highest = -1, Memory()
        self._due = 0.0

    def due(self, now: float) -> Memory | None:
        """The latest account, at most once a second; from any one thread."""
        if self.latest is None or now < self._due:
            return None
        self._due = now + TOLD_SECONDS
        return self.latest

    def executed(self, engine: "Engine", run: "Run") -> None:
        """A cell's instruction is done.

        Before its first backward most microbatches are in flight, and most cells have to wait then. When its last
        instruction is done, the log and what was computed in advance are complete.
        """
        if run.next is None:
            self._take(engine, run.step)
            self.latest = self._highest
        elif isinstance(run.next, Backward) and not any(isinstance(i, Backward) for i in run.program[: run.done]):
            self._take(engine, run.step)

    def changed(self, engine: "Engine", step: int) -> None:
        """A new plan, or an optimizer step: a worker that runs no cell has no other occasion."""
        if not any(run.program for run in engine.runs.values()):
            self._take(engine, step)
            self.latest = self._highest

    def _take(self, engine: "Engine", step: int) -> None:
        taken = account(engine)
        self._highest = self._highest.highest(taken) if step == self._step else taken
        self._step = step


def account(engine: "Engine") -> Memory:
    """Every storage counts once. What autograd keeps cannot be seen: it counts as in each stage's first forward."""
    seen: set[int] = set()
    states = [(index, h.owned, h.stage.state_bytes()) for index, h in engine.holdings.items() if h.stage]
    works = [(run.cell.stage, run.work) for run in engine.runs.values() if run.work]
    shadows = [*engine.shadows.values(), *(run.ahead for run in engine.runs.values() if run.ahead)]
    return Memory(  # NB: in this order, as what has been seen does not count again
        parameters=sum(held + _context(engine, index).casts for index, owned, (held, _) in states if owned),
        optimizer=sum(remembered for _, owned, (_, remembered) in states if owned),
        replica=sum(held + remembered for _, owned, (held, remembered) in states if not owned),
        gradients=new_bytes(_gradients(engine), seen),
        log=_log(engine, seen),
        activations=new_bytes((t for _, work in works for t in _contexts(work)), seen)
        + sum(len(work.contexts) * _context(engine, stage).here for stage, work in works),
        redundant=new_bytes((t for shadow in shadows for t in _in_advance(shadow)), seen)
        + sum(_redundant_contexts(engine, shadow) for shadow in shadows),
        received=new_bytes(_received(engine), seen),
    )


def _context(engine: "Engine", stage: int) -> ContextSize:
    holding = engine.holdings.get(stage)
    return (holding.stage.context if holding and holding.stage else None) or ContextSize()


def _redundant_contexts(engine: "Engine", shadow: "Shadow") -> int:
    """A forward that is begun counts as done."""
    size = _context(engine, shadow.cell.stage)
    adopted = any(run.work is shadow.work for run in engine.runs.values())  # then they are activations
    count = len(shadow.forwardings) + (0 if adopted else len(shadow.work.contexts))
    if engine.on_host:
        return count * size.on_host
    return count * size.here + (size.casts if count and not adopted else 0)


def _gradients(engine: "Engine") -> Iterator[Tensor]:
    for run in engine.runs.values():
        if run.work:
            yield run.work.gradient
        if run.final is not None:
            yield run.final
    for holding in engine.holdings.values():
        yield from holding.reduced.values()
    for frame in engine.ceded.values():
        yield from frame.tensors


def _log(engine: "Engine", seen: set[int]) -> int:
    new = {address: size for address, size in engine.log.storages.items() if address not in seen}
    seen.update(new)
    return sum(new.values())


def _contexts(work: "Work") -> Iterator[Tensor]:
    for inputs, outputs in work.contexts.values():
        yield from inputs
        yield from outputs


def _in_advance(shadow: "Shadow") -> Iterator[Tensor]:
    yield shadow.work.gradient
    yield from _contexts(shadow.work)
    for forwarding in shadow.forwardings.values():
        yield from forwarding.leaves
        yield from forwarding.parts
    for done in (shadow.outputs, shadow.gradients):
        for parts in done.values():
            yield from parts


def _received(engine: "Engine") -> Iterator[Tensor]:
    frames = [frame for run in engine.runs.values() for frame in run.inbox.values()]
    frames += [frame for _, frame in engine.orphans]
    for frame in [*frames, *engine.echoes.values()]:
        yield from frame.tensors
