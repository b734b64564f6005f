"""Rehearsals: runs of a replicated stage while the worker has nothing else to do.

A stage that has not run here is rehearsed with a forward and a backward: first runs are slow and would delay a
takeover. Later rehearsals, every `PERIOD` steps, are forwards with timed layers: workers of one pipeline run different
layers, and are compared by layers that two of them have run (`bamboo_core.planning.splits.speeds`).

The inputs are the outputs of the worker's own stage, which precedes the replicated one; stage 0 reads data. With
several devices only the replicated stage's first part gets them; other parts get the outputs of the part before.
"""

from collections.abc import Sequence
from typing import Final

from bamboo_core.planning.plan import Cell
from bamboo_trainer.engine.cell_step import CellStep
from bamboo_trainer.engine.ports import EngineContext
from bamboo_trainer.frames import Address, FrameKind
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.task import Parts

PERIOD: Final = 8  # steps

Place = tuple[Cell, int, int]  # cell, step and microbatch


class Rehearsals:
    """A scheduler of an idle worker's rehearsals: it decides when to run which replicated stage, and runs it."""

    def __init__(self, shared: EngineContext) -> None:
        self._plan, self._log, self._states = shared.plan, shared.outbox.log, shared.states
        self._observer, self._devices = shared.ports.observer, shared.devices
        self._disturbed: int | None = None  # the step in which roles have changed
        self._timed: dict[Cell, int] = {}  # the newest step in which a cell's forward was timed
        self._given: dict[tuple[Cell, int], Parts] = {}  # by part and step: outputs of the part before it

    def take_roles(self, step: int, *, first: bool) -> None:
        """Forbid rehearsals in this step, as a new plan may change roles. first: the plan is the first; permit them."""
        self._disturbed = None if first else step
        self._timed.clear()

    def turn(self, active: Sequence[CellStep]) -> bool:
        """Rehearse a replicated stage; return False if none can be now. active: the steps of the one stage run here."""
        self._devices.collect()
        return any(self._rehearse_behind(one) for one in reversed(active))

    def _rehearse_behind(self, active: CellStep) -> bool:
        """Rehearse the next stage's cell. Return False if this worker is not its shadow, no rehearsal is due, or the
        inputs are missing. After a plan other than the first, none is due in the same step: others may wait for work
        that this worker repeats.
        """
        plan, layout, step = self._plan.current, active.layout, active.step
        (d, s), devices = active.cell, self._plan.devices
        cell = Cell(d, (s + devices) % len(plan.stages))  # the next one in the ring
        if layout is None or step == self._disturbed or cell == active.cell:
            return False
        stage = self._states.stage(cell.stage) if plan.at(cell).shadow == self._plan.worker else None
        if stage is None or stage.values.version != step or self._states.has_final(cell.stage, step):
            return False
        is_new = not stage.has_run
        if not is_new and (step % PERIOD or self._timed.get(cell) == step):
            return False
        place = (cell, step, layout.split[d][0])
        inputs = self._given.pop((cell, step), None) or self._sent(place)
        if inputs is None and cell.stage > 0:
            return False
        self._timed[cell] = step
        outputs = self._run(stage, place, inputs, is_timed=not is_new)
        behind = Cell(d, cell.stage + 1)
        if self._plan.are_parts((cell, behind)):
            self._given = {(behind, step): tuple(part.cpu() for part in outputs)}
        return True

    def _sent(self, place: Place) -> Parts | None:
        """Return the inputs of a cell's microbatch from the log of sent frames; None if they are not in the log."""
        frame = self._log.get(Address(FrameKind.ACTIVATION, *place[0], *place[1:]))
        return frame.inputs if frame else None

    def _run(self, stage: Stage, place: Place, inputs: Parts | None, *, is_timed: bool) -> Parts:
        """Run a forward and a backward; return the outputs. is_timed: instead, run a forward and time each layer."""
        self._observer.started("Rehearsal", *place)
        with self._devices.measuring(stage):
            if is_timed:
                work = stage.begin([place[2]], [place[2], place[2] + 1])
                outputs = self._devices.forward_by_layer(stage, work, place[1:], inputs)
            else:
                outputs = stage.rehearse(*place[1:], inputs)
        self._observer.finished("Rehearsal", *place)
        return outputs
