"""What a cell's shadow computes in advance while it would wait: forwards (FRC), and in one mode backwards (BRC).

The shadow is the worker of the stage before: it has the lost stage's inputs, because it made them. In `EagerForward` a
layer is run only if the expected bubble has room for it (see `pace`), so that no critical instruction is delayed; in
`EagerBackward` everything is run whenever the worker is idle, as the published system does. What is there when the
shadow takes over is used; the rest is computed then.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bamboo.plan import Cell, Layout
from bamboo.spec import RedundancyMode
from bamboo_trainer.engine.cell_step import Run
from bamboo_trainer.engine.schedule import Backward, Forward, one_f_one_b
from bamboo_trainer.stage.stage import Forwarding, Stage, Work
from bamboo_trainer.task import Parts
from bamboo_trainer.transport.frames import Address, Frame, Kind

if TYPE_CHECKING:
    from bamboo_trainer.engine.engine import Engine


@dataclass(slots=True)
class Shadow:
    """Work on one step of a cell that another worker runs. forwardings: begun; outputs, gradients: done."""

    cell: Cell
    step: int
    layout: Layout
    work: Work
    forwardings: dict[int, Forwarding] = field(default_factory=dict)
    outputs: dict[int, Parts] = field(default_factory=dict)
    gradients: dict[int, Parts] = field(default_factory=dict)

    def forwarded(self, microbatch: int) -> bool:
        return microbatch in self.outputs


def turn(engine: "Engine") -> bool:
    """Run one piece of redundant work, if there is one that may run now."""
    assert engine.plan is not None
    active = [run for run in engine.runs.values() if run.program]
    if len(active) != 1 or engine.plan.mode is RedundancyMode.NONE:
        return False
    run = active[0]
    cell = Cell(run.cell.pipeline, (run.cell.stage + 1) % len(engine.plan.stages))  # the next one in the ring
    if cell == run.cell or engine.plan.at(cell).shadow != engine.worker:
        return False
    holding = engine.holdings[cell.stage]
    stage = holding.stage
    if stage is None or stage.version != run.step or run.layout is None or run.step >= engine.steps:
        return False
    if run.step in holding.reduced:
        return False  # the cell has finished the step: nothing of it will be repeated
    return _rehearse(engine, run, cell, stage) or _work(engine, run, cell, stage)


def _rehearse(engine: "Engine", run: Run, cell: Cell, stage: Stage) -> bool:
    """Once, before it matters: what runs for the first time is slow, and must not be so in a takeover."""
    holding = engine.holdings[cell.stage]
    if holding.rehearsed or engine.pace.measures(run.step) or run.layout is None:
        return False
    microbatch = run.layout.split[cell.pipeline][0]
    if not _inputs_known(engine, cell, run.step, microbatch):
        return False
    holding.rehearsed = True
    engine.observer.started("Rehearsal", cell, run.step, microbatch)
    stage.rehearse(run.step, microbatch, _inputs(engine, cell, run.step, microbatch))
    engine.observer.finished("Rehearsal", cell, run.step, microbatch)
    return True


def _work(engine: "Engine", run: Run, cell: Cell, stage: Stage) -> bool:
    assert engine.plan is not None
    assert run.layout is not None
    mode, shadow = engine.plan.mode, engine.shadows.get(cell)
    if mode is RedundancyMode.LAZY_FORWARD or engine.pace.measures(run.step):
        return False
    if shadow is None or shadow.step != run.step or shadow.layout != run.layout:
        shadow = engine.shadows[cell] = Shadow(cell, run.step, run.layout, stage.begin())
    if mode is RedundancyMode.EAGER_FORWARD:
        return _fill(engine, run, shadow, stage)
    return _mirror(engine, shadow, stage)


def _fill(engine: "Engine", run: Run, shadow: Shadow, stage: Stage) -> bool:
    """One layer of the first forward that is not done yet, if it fits into the bubble."""
    microbatches = shadow.layout.split[shadow.cell.pipeline]
    microbatch = next((m for m in microbatches if not shadow.forwarded(m)), None)
    if microbatch is None or not _inputs_known(engine, shadow.cell, shadow.step, microbatch):
        return False
    forwarding = shadow.forwardings.get(microbatch)
    layer = forwarding.layer if forwarding else stage.first
    now = engine.clock()
    idle = now - engine.idle_since if engine.idle_since is not None else 0.0
    if not engine.pace.fits((run.cell, run.done), idle, shadow.cell.stage, layer):
        return False
    _advance(engine, shadow, stage, microbatch)
    engine.pace.ran_layer(shadow.cell.stage, layer, engine.clock() - now)
    return True


def _advance(engine: "Engine", shadow: Shadow, stage: Stage, microbatch: int) -> None:
    engine.observer.started("RedundantForward", shadow.cell, shadow.step, microbatch)
    if microbatch not in shadow.forwardings:
        inputs = _inputs(engine, shadow.cell, shadow.step, microbatch)
        shadow.forwardings[microbatch] = stage.start(shadow.step, microbatch, inputs, engine.on_host)
    forwarding = shadow.forwardings[microbatch]
    stage.advance(forwarding)
    stage.wait()
    if forwarding.done:
        shadow.outputs[microbatch] = stage.complete(shadow.work, shadow.forwardings.pop(microbatch))
    engine.observer.finished("RedundantForward", shadow.cell, shadow.step, microbatch)


def _mirror(engine: "Engine", shadow: Shadow, stage: Stage) -> bool:
    """The next forward or backward in the cell's own order: its gradients must be summed in that order, too."""
    assert engine.plan is not None
    d, s = shadow.cell
    last = s == len(engine.plan.stages) - 1
    for instruction in one_f_one_b(s, len(engine.plan.stages), shadow.layout.split[d], engine.lookahead):
        m = instruction.microbatch
        if isinstance(instruction, Forward) and not shadow.forwarded(m):
            if not _inputs_known(engine, shadow.cell, shadow.step, m):
                return False
            _advance(engine, shadow, stage, m)
            return True
        if isinstance(instruction, Backward) and m not in shadow.gradients:
            address = Address(Kind.GRADIENT, d, s, shadow.step, m)
            frame = engine.echoes.get(address) or engine.log.get(address)
            if frame is None and not last:
                return False
            engine.observer.started("RedundantBackward", shadow.cell, shadow.step, m)
            gradients = None if last or frame is None else frame.tensors
            shadow.gradients[m] = stage.backward(shadow.work, shadow.step, m, gradients)
            stage.wait()
            engine.observer.finished("RedundantBackward", shadow.cell, shadow.step, m)
            return True
    return False


def _inputs_known(engine: "Engine", cell: Cell, step: int, microbatch: int) -> bool:
    return cell.stage == 0 or engine.log.get(Address(Kind.ACTIVATION, *cell, step, microbatch)) is not None


def _inputs(engine: "Engine", cell: Cell, step: int, microbatch: int) -> Parts | None:
    frame = engine.log.get(Address(Kind.ACTIVATION, *cell, step, microbatch))
    return frame.tensors if frame else None


def listens(engine: "Engine", frame: Frame) -> bool:
    """Is the frame for a cell that we shadow? With a newer plan we may be its owner, so such a frame has to wait."""
    plan, cell = engine.plan, frame.address.cell
    if plan is None or frame.epoch > plan.epoch or cell not in plan.cells():
        return False
    return plan.at(cell).shadow == engine.worker


def echo(engine: "Engine", frame: Frame) -> None:
    """A gradient for a cell goes to its shadow, too, if that runs backwards in advance."""
    assert engine.plan is not None
    if engine.plan.mode is RedundancyMode.EAGER_BACKWARD and frame.address.kind is Kind.GRADIENT:
        shadow = engine.plan.at(frame.address.cell).shadow
        if shadow not in (None, engine.worker):
            engine.send(shadow, frame)
