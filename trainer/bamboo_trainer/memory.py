"""What this worker's memory is used for: the account, and when it is taken."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from bamboo.memory import Memory
from bamboo_trainer.schedule import Backward, Instruction

if TYPE_CHECKING:
    from bamboo_trainer.engine import Engine
    from bamboo_trainer.redundancy import Shadow
    from bamboo_trainer.run import Run
    from bamboo_trainer.stage import Work


class Meter:
    """Takes the account twice in a step, where it is highest, and keeps the larger number of each kind.

    latest: of the newest step that is over here.
    """

    def __init__(self) -> None:
        self.latest: Memory | None = None
        self._step, self._highest = -1, Memory()

    def before(self, engine: "Engine", run: "Run", instruction: Instruction) -> None:
        """The contexts of a cell are at their highest when its first backward begins."""
        if isinstance(instruction, Backward) and not any(isinstance(i, Backward) for i in run.program[: run.done]):
            self._take(engine, run.step)

    def after(self, engine: "Engine", run: "Run") -> None:
        """The log is at its highest, and so is what was computed in advance, when a cell's last instruction is done."""
        if run.next is None:
            self._take(engine, run.step)
            self.latest = self._highest

    def updated(self, engine: "Engine", step: int) -> None:
        """A worker that has nothing but replicas has only their updates."""
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
    states = {
        owned: [h.stage.state_bytes() for h in engine.holdings.values() if h.stage and h.owned is owned]
        for owned in (True, False)
    }
    runs = [(run.cell.stage, run.work) for run in engine.runs.values() if run.work]
    own = {id(work) for _, work in runs}
    shadows = [*engine.shadows.values(), *(run.ahead for run in engine.runs.values() if run.ahead)]
    begun = [(s.cell.stage, len(s.forwardings)) for s in shadows]
    begun += [(s.cell.stage, len(s.work.contexts)) for s in shadows if id(s.work) not in own]
    return Memory(  # NB: in this order, what has been seen does not count again
        parameters=sum(parameters for parameters, _ in states[True]),
        optimizer=sum(optimizer for _, optimizer in states[True]),
        replica=sum(map(sum, states[False])),
        gradients=new_bytes(_gradients(engine), seen),
        log=new_bytes(engine.log.tensors(), seen),
        activations=new_bytes((t for _, work in runs for t in _contexts(work)), seen)
        + sum(len(work.contexts) * _context_bytes(engine, stage) for stage, work in runs),
        redundant=new_bytes((t for shadow in shadows for t in _in_advance(shadow)), seen)
        + sum(count * _context_bytes(engine, stage) for stage, count in begun),
        received=new_bytes(_received(engine), seen),
    )


def new_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages that are not among the seen ones, and now are."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in seen:
            seen.add(address)
            total += storage.nbytes()
    return total


@contextmanager
def saved_storages() -> Iterator[dict[int, int]]:
    """Around a forward: the storages that it keeps for the backward, address to bytes."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # NB: an output that its own graph holds would never be freed

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield storages


def _context_bytes(engine: "Engine", stage: int) -> int:
    holding = engine.holdings.get(stage)
    return holding.stage.context_bytes or 0 if holding and holding.stage else 0


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
