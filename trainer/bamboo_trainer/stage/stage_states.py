"""The states of stages on this worker: those that it runs, and those that it replicates."""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bamboo_core.planning.plan import Cell, Plan, WorkerId
from bamboo_trainer.frames.payloads import Commit
from bamboo_trainer.memory.headroom import has_room
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.state.values import StageValues
from bamboo_trainer.task import Parts


class StageBuilder(Protocol):
    """Makes stages in the state before the first step. stages: the layers of all, half-open ranges."""

    def stage(self, index: int, stages: Sequence[tuple[int, int]], *, begins: bool = False) -> Stage:
        """The one of that number. begins: training begins with its values, and no other state takes their place."""


def first_states(plan: Plan, worker: WorkerId) -> list[int]:
    """The numbers of the states that a worker begins with which has obeyed no plan of this origin before.

    Who owns a cell in the first plan that it hears of owns it since the plan's origin. Of a later plan of that origin
    what it replicates comes from the owners.
    """
    owned = {cell.stage for cell in plan.owned_by(worker)}
    replicated = {cell.stage for cell in plan.replicated_by(worker)}
    return sorted(owned | replicated if plan.epoch == plan.origin else owned)


def _helps(plan: Plan, worker: WorkerId, devices: int) -> bool:
    """Does a worker with so many devices run more than one cell on each of them, or a portion of one?"""
    portions = (portion for cell in plan.cells() for portion in plan.at(cell).portions)
    return len(plan.owned_by(worker)) > devices or any(portion.worker == worker for portion in portions)


@dataclass(slots=True)
class StageState:
    """stage: None while it is on its way. owned: it is run here, not only kept for another worker.

    staying: it is of a cell that goes on, not of a pipeline that the job is about to drop.
    final: the final gradients of steps that are not applied yet, by step; behind them, if the stage has running
    buffers, the bytes of their values after that step.
    """

    stage: Stage | None
    owned: bool = False
    staying: bool = True
    rehearsed: bool = False
    final: dict[int, Parts] = field(default_factory=dict)

    @property
    def version(self) -> int:
        """The step that it is ready for; -1 while there is none."""
        return self.stage.values.version if self.stage else -1


class StageStates:
    """by_stage: by the number of the stage; changed here only."""

    def __init__(self, builder: StageBuilder, on_host: bool, begun: Mapping[int, Stage]) -> None:
        """on_host: what is kept for others only waits in host memory. begun: stages in their first state, by number."""
        self._builder, self._on_host, self._begun = builder, on_host, dict(begun)
        self._helps = False
        self.by_stage: dict[int, StageState] = {}

    def take_roles(self, plan: Plan, worker: WorkerId) -> None:
        """Keep the states of the stages that this worker has a part in."""
        owned = {c.stage for c in plan.owned_by(worker)}
        replicated = {c.stage for c in plan.replicated_by(worker)}
        held = (c for c in plan.cells() if worker in plan.at(c).holders)
        staying = {c.stage for c in held if c.pipeline < plan.target.pipelines}
        for index in [s for s in self.by_stage if s not in owned | replicated]:
            del self.by_stage[index]
        for index in sorted(owned | replicated):
            if index not in self.by_stage:
                stage = self._begun.pop(index, None)
                assert stage or index not in owned, f"{worker} is to own stage {index} and has no state of it"
                self.by_stage[index] = StageState(stage)
        devices = {state.stage.values.device for state in self.by_stage.values() if state.stage}
        self._helps = _helps(plan, worker, max(1, len(devices)))
        for index in sorted(owned | replicated):
            self._give(self.by_stage[index], index in owned)
            self.by_stage[index].staying = index in staying

    def _give(self, state: StageState, owned: bool) -> None:
        """Of a worker that also runs what another one has lost the optimizer's state waits in host memory if the device
        has no room for the gradients, and the microbatches in flight, of that.
        """
        state.owned = owned
        if state.stage is None:
            return
        values = state.stage.values
        if not owned:
            values.park(self._on_host)
        elif not self._helps:
            values.park(False)
        elif not has_room(values.device, 2 * 4 * values.final.gradient_size):
            values.park(True)

    def __contains__(self, index: int) -> bool:
        return index in self.by_stage

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.by_stage))

    def here(self, index: int) -> StageValues | None:
        """None if this worker has no part in it, or if its state is on the way."""
        stage = self.stage(index)
        return stage.values if stage else None

    def __getitem__(self, index: int) -> StageValues:
        """One that must be here."""
        values = self.here(index)
        assert values is not None
        return values

    def stage(self, index: int) -> Stage | None:
        """What computes on the state of that number, if it is here."""
        state = self.by_stage.get(index)
        return state.stage if state else None

    def of(self, cell: Cell) -> StageValues | None:
        """The state that a cell's owner and replicas hold, if it is here."""
        return self.here(cell.stage)

    def running(self, cell: Cell) -> Stage:
        """The stage on which a cell's forwards and backwards run, which must be here."""
        stage = self.stage(cell.stage)
        assert stage is not None
        return stage

    def version(self, index: int) -> int:
        return self.by_stage[index].version

    def oldest(self, otherwise: int) -> int:
        """The oldest version that is held here."""
        return min((state.version for state in self.by_stage.values()), default=otherwise)

    def tied_to(self, cell: Cell) -> tuple[int, ...]:
        """The other stages that share parameters with that cell's, in order."""
        segments = self.running(cell).values.final.tied
        return tuple(sorted({s for segment in segments for s in segment.stages} - {cell.stage})) if segments else ()

    # final gradients

    def keep_final(self, index: int, step: int, final: Parts) -> bool:
        """False if it is there already, or applied."""
        state = self.by_stage[index]
        if step < state.version or step in state.final:
            return False
        state.final[step] = final
        return True

    def final(self, index: int, step: int) -> Parts | None:
        return self.by_stage[index].final.get(step) if index in self.by_stage else None

    def has_final(self, index: int, step: int) -> bool:
        return index in self.by_stage and step in self.by_stage[index].final

    def final_steps(self, index: int) -> list[int]:
        """Whose final gradients are here and not applied yet. A new owner may have some of the one before."""
        return sorted(self.by_stage[index].final)

    def secured(self, index: int) -> int:
        """The version that can be reached here without anybody's help."""
        state = self.by_stage[index]
        return state.version + (state.version in state.final)

    def applicable(self, committed: Container[int], ran: Container[int], owned: bool) -> int | None:
        """A stage whose step is committed and whose final gradient is here. owned: of those that are run here.

        ran: those whose step was run here, so that what it sent is in the log. All others of a version wait for each
        other: of stages that are lost together none can be repeated without the others, so who takes them over must
        have them all at the same version.
        """
        for index, state in self.by_stage.items():
            ready = state.version in committed and state.version in state.final and (state.owned or not owned)
            if ready and (index in ran or self._all_have_final(state.version)):
                return index
        return None

    def _all_have_final(self, version: int) -> bool:
        level = (s for s in self.by_stage.values() if s.stage and s.staying and s.version == version)
        return all(version in state.final for state in level)

    def allow_commit(self, step: int) -> None:
        """May the step be committed, as far as the states tell that are run here? Raises TaskError."""
        for state in self.by_stage.values():
            if state.owned and state.stage and state.version == step:
                state.stage.values.allow_commit()

    def apply(self, index: int, commit: Commit, *, tries: bool = False) -> None:
        """Go to the next version, as the commit says: by the optimizer's step, or by skipping it.

        tries: as `StageValues.apply` does.
        """
        state, values = self.by_stage[index], self[index]
        gradient, *running = state.final.pop(state.version)
        values.evaluated(commit.evaluation)
        if commit.skipped:
            values.skip(finite=math.isfinite(commit.norm))
        else:
            values.apply(gradient, commit.norm, *running, scale=commit.scale, tries=tries)
        values.obey(commit.decided)

    # states of others

    def restore(self, index: int, stages: Sequence[tuple[int, int]], tensors: Parts, facts: Mapping[str, Any]) -> None:
        """Go on from another worker's state, which is newer. Raises ValueError, and then nothing has changed."""
        state = self.by_stage[index]
        stage = state.stage or self._builder.stage(index, stages)
        values = stage.values
        values.restore(tensors, facts)
        state.stage = stage
        self._give(state, state.owned)
        state.final = {k: f for k, f in state.final.items() if k >= values.version and values.final.takes(f)}

    def begin_rehearsal(self, index: int) -> None:
        self.by_stage[index].rehearsed = True
