"""The states of the stages that this worker runs or replicates."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from bamboo_core.planning.plan import Cell, Plan, WorkerId
from bamboo_trainer.frames import Commit
from bamboo_trainer.memory.limits import has_room
from bamboo_trainer.stage.layer_state import LayerState
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.values import StageValues


class StageBuilder(Protocol):
    """A builder of a job's stages."""

    def stage(self, index: int, stages: Sequence[tuple[int, int]], *, begins: bool = False) -> Stage:
        """Build a stage. stages: all stages' layers, half-open ranges. begins: training starts with its values."""


def first_states(plan: Plan, worker: WorkerId) -> list[int]:
    """Return the stages whose states a worker builds or restores when it obeys its first plan of an origin.

    With the origin's own plan, these are the stages that the worker owns or replicates. With a later plan, they are
    the stages that it owns, as it has done since the origin; owners send it the states that it replicates.
    """
    owned = {cell.stage for cell in plan.owned_by(worker)}
    replicated = {cell.stage for cell in plan.replicated_by(worker)}
    return sorted(owned | replicated if plan.epoch == plan.origin else owned)


def _helps(plan: Plan, worker: WorkerId, devices: int) -> bool:
    """Return whether a worker owns more cells than it has devices, or runs a portion of a cell."""
    portions = (portion for cell in plan.cells() for portion in plan.at(cell).portions)
    return len(plan.owned_by(worker)) > devices or any(portion.worker == worker for portion in portions)


@dataclass(slots=True)
class StageState:
    """One stage's state on this worker.

    stage: None while the state is on its way. owned: this worker owns a cell of the stage, and is not only a replica.
    staying: at least one cell for which this worker holds the state is in a pipeline of the plan's target layout.
    final: final gradients that are not applied yet, by step.
    """

    stage: Stage | None
    owned: bool = False
    staying: bool = True
    final: dict[int, Tensor] = field(default_factory=dict)

    @property
    def version(self) -> int:
        """The step for which the state is ready; -1 while the state is on its way."""
        return self.stage.values.version if self.stage else -1


class StageStates:
    """The states of this worker's stages.

    by_stage: the states by the number of the stage; only this class changes the mapping.
    """

    def __init__(self, builder: StageBuilder, on_host: bool, begun: Mapping[int, Stage]) -> None:
        """Create the object without states, which `take_roles` adds. on_host: keep replicas' optimizer states in host
        memory. begun: the stages that this worker has built or restored to begin with, by number.
        """
        self._builder, self._on_host, self._begun = builder, on_host, dict(begun)
        self._helps = False
        self.by_stage: dict[int, StageState] = {}

    def take_roles(self, plan: Plan, worker: WorkerId) -> None:
        """Keep or add an entry for each stage that this worker owns or replicates under a new plan; drop all others."""
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
        """Record whether this worker owns a cell of a stage, and set where its optimizer's state waits between steps.

        A replica's state waits on the host if `on_host`, an owned stage's on the device. If the worker owns more cells
        than it has devices, or runs a portion, an owned stage's stays in place, or moves to the host for lack of room.
        """
        state.owned = owned
        if state.stage is None:
            return
        values = state.stage.values
        if not owned:
            values.park(self._on_host)
        elif not self._helps:
            values.park(False)
        elif not has_room(values.device, 2 * 4 * values.gradient_size):
            values.park(True)

    def __contains__(self, index: int) -> bool:
        return index in self.by_stage

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.by_stage))

    def here(self, index: int) -> StageValues | None:
        """Return a stage's values; None if this worker does not hold the stage, or its state is still on the way."""
        stage = self.stage(index)
        return stage.values if stage else None

    def __getitem__(self, index: int) -> StageValues:
        """Return the values of a stage; this worker must have its state."""
        values = self.here(index)
        assert values is not None
        return values

    def stage(self, index: int) -> Stage | None:
        """Return the stage of that number; None if this worker does not hold it, or its state is still on the way."""
        state = self.by_stage.get(index)
        return state.stage if state else None

    def running(self, cell: Cell) -> Stage:
        """Return the stage that runs a cell's forwards and backwards; this worker must have its state."""
        stage = self.stage(cell.stage)
        assert stage is not None
        return stage

    def version(self, index: int) -> int:
        return self.by_stage[index].version

    def oldest(self, otherwise: int) -> int:
        """Return the oldest version of this worker's states, -1 if one is on its way; without states, `otherwise`."""
        return min((state.version for state in self.by_stage.values()), default=otherwise)

    def tied_to(self, cell: Cell) -> tuple[int, ...]:
        """Return the other stages that share trained parameters with that cell's stage, in order."""
        segments = self.running(cell).values.tied
        return tuple(sorted({s for segment in segments for s in segment.stages} - {cell.stage})) if segments else ()

    # final gradients

    def keep_final(self, index: int, step: int, final: Tensor) -> bool:
        """Keep a step's final gradient and return True; return False if it is kept, or the state is past the step."""
        state = self.by_stage[index]
        if step < state.version or step in state.final:
            return False
        state.final[step] = final
        return True

    def final(self, index: int, step: int) -> Tensor | None:
        return self.by_stage[index].final.get(step) if index in self.by_stage else None

    def has_final(self, index: int, step: int) -> bool:
        return index in self.by_stage and step in self.by_stage[index].final

    def final_steps(self, index: int) -> list[int]:
        """Return, in order, the steps whose final gradients for a stage are here and not applied yet."""
        return sorted(self.by_stage[index].final)

    def secured(self, index: int) -> int:
        """Return a stage's version, plus 1 if the final gradient that leads to the next version is here."""
        state = self.by_stage[index]
        return state.version + (state.version in state.final)

    def applicable(self, committed: Container[int], ran: Container[int], owned: bool) -> int | None:
        """Return a stage to which a step of `committed` can be applied, or None. owned: consider only owned stages.

        ran: stages that ran their step here, so the log has the frames that they sent. Any other stage waits until all
        `staying` stages at the same version have their final gradients: stages lost together can only be repeated
        together, by a worker that has all of them at the same version.
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
        """Raise TaskError if an owned stage at this step forbids its commit; see `StageValues.allow_commit`."""
        for state in self.by_stage.values():
            if state.owned and state.stage and state.version == step:
                state.stage.values.allow_commit()

    def apply(self, index: int, commit: Commit, *, tries: bool = False) -> None:
        """Bring a stage to the next version: apply its final gradient, or skip the step if the commit says so. tries:
        see `StageValues.apply`.
        """
        state, values = self.by_stage[index], self[index]
        gradient = state.final.pop(state.version)
        if commit.skipped:
            values.skip()
        else:
            values.apply(gradient, commit.norm, scale=commit.scale, tries=tries)
        values.begin_step(commit.common)

    # states of other workers

    def restore(self, index: int, stages: Sequence[tuple[int, int]], layers: Mapping[int, LayerState]) -> None:
        """Restore a stage, built first if it is not here, to another worker's state; drop older final gradients."""
        state = self.by_stage[index]
        state.stage = state.stage or self._builder.stage(index, stages)
        state.stage.values.restore(layers)
        self._give(state, state.owned)
        state.final = {step: final for step, final in state.final.items() if step >= state.version}
