"""New parameters for those who do not update them themselves: see `bamboo_core.planning.shards`.

The owner of a cell sends the values of its shard to all cells, at every version that the shard comes to, and once what
no step changes. Like all frames to cells they stay in the log for two steps, so whoever runs a cell then gets them.
"""

from collections.abc import Iterable, Iterator

from bamboo_core.planning.plan import Cell, Plan
from bamboo_trainer.commit.commit_log import CommitLog
from bamboo_trainer.commit.repeated_steps import Repeated
from bamboo_trainer.frames.frame import FIXED, Address, Frame, FrameKind
from bamboo_trainer.frames.payloads import RefusedFrame
from bamboo_trainer.routing.outbox import Outbox
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.stage_states import StageStates
from bamboo_trainer.stage.state.values import StageValues


class ParameterDistribution:
    """sent: the version that the values of each cell of this worker were sent of last."""

    def __init__(self, plan: PlanState, outbox: Outbox, states: StageStates) -> None:
        self._plan, self._outbox, self._states = plan, outbox, states
        self._sent: dict[Cell, int] = {}

    def take_roles(self, old: Plan | None) -> None:
        """The plan in force is new. Whoever has begun to run a cell may need everything. old: the one before."""
        plan, worker = self._plan.current, self._plan.worker
        if not plan.shards:
            return
        cells = plan.cells()
        self._sent = {c: version for c, version in self._sent.items() if c in cells and plan.at(c).owner == worker}
        moved = [c for c in cells if old is not None and plan.at(c).owner != old.at(c).owner]
        for cell in plan.owned_by(worker):
            held, mine = self._states.of(cell), cell in self._sent
            if held is not None and mine and moved:
                self._send(cell, held, moved, fixed=True)
                self._send(cell, held, moved, fixed=False)
            elif held is not None and not mine:
                self._send(cell, held, cells, fixed=True)
        self.refresh()

    def refresh(self) -> bool:
        """A shard's state may be new here. False if there are no shards."""
        plan = self._plan.current
        for cell in plan.owned_by(self._plan.worker) if plan.shards else []:
            held = self._states.of(cell)
            if held is not None and self._sent.get(cell) != held.version:
                self._sent[cell] = held.version
                self._send(cell, held, plan.cells(), fixed=False)
        return bool(plan.shards)

    def _send(self, cell: Cell, held: StageValues, to: Iterable[Cell], *, fixed: bool) -> None:
        shard = self._states.number(cell)
        layers = self._plan.current.shards[shard]
        values = [value.detach().to("cpu", copy=True) for value in held.of_layers(layers, fixed=fixed)]
        for other in to:
            address = Address(FrameKind.PARAMETERS, *other, held.version, FIXED if fixed else 0, shard)
            self._outbox.emit(address, values)

    def take(self, frame: Frame) -> None:
        """Values of a shard for a cell that is run here. Raises RefusedFrame."""
        address, whole = frame.address, self._states.whole
        if whole is None:
            return
        try:
            whole.take(address.step, address.part, frame.tensors, fixed=address.microbatch == FIXED)
        except ValueError as error:
            raise RefusedFrame(str(error)) from error

    def never_begun(self, cells: Iterable[Cell], log: CommitLog) -> Iterator[Repeated]:
        """The committed steps that cells that are run here are to repeat, and for which not all parameters are here."""
        step = self._states.next_version() if self._plan.current.shards else -1
        for cell in cells if step in log.commits else ():
            if not self._states.has_final(self._states.number(cell), step) and (lacked := self._lacked(cell, step)):
                yield Repeated(cell, step, lacked)

    def _lacked(self, cell: Cell, version: int) -> list[Address]:
        """The frames that the whole model needs for that version, and that are not here."""
        return [
            Address(FrameKind.PARAMETERS, *cell, version, FIXED if fixed else 0, shard)
            for shard, fixed in self._states.lacks()
        ]
