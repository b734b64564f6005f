"""Which layers this worker writes of a state that is kept, and the copies of them.

They are made while the worker waits for others in the step after; what is not copied when the state is about to change
is copied then, and only for that training waits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bamboo.planning.plan import CheckpointId, WorkerId
from bamboo.planning.shares import share
from bamboo_trainer.commit.commit_log import CommitLog
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.stage_states import StageStates
from bamboo_trainer.stage.state.late_copies import Copying
from bamboo_trainer.stage.state.layer_state import LayerState

Keep = Callable[[CheckpointId, Mapping[int, LayerState], float], None]
Hold = Callable[[CheckpointId, Mapping[int, LayerState]], None]


@dataclass(slots=True)
class _Share:
    """Of a stage. seconds: for which training has waited for it."""

    checkpoint: CheckpointId
    copying: Copying
    seconds: float


class CheckpointShares:
    """keep: takes copies, and the seconds for which training waited; it does the rest elsewhere. hold: takes copies of
    a cut. copied: is told of a stage whose copies are made, before they are kept.
    """

    def __init__(
        self,
        plan: PlanState,
        states: StageStates,
        log: CommitLog,
        keep: Keep,
        hold: Hold,
        clock: Callable[[], float],
        copied: Callable[[int], None],
    ) -> None:
        self._copied = copied
        self._plan, self._states, self._log, self._clock = plan, states, log, clock
        self._keep, self._hold = keep, hold
        self._shares: dict[int, _Share] = {}  # by stage: those that are being copied
        self._last: CheckpointId | None = None  # that was asked for after the last step

    def reached(self, stage: int) -> None:
        """A stage that is held here has come to another version, by itself or with another worker's state."""
        self.finish(stage)  # of a state that was given up meanwhile: nothing changes it
        version = self._states.version(stage)
        commit = self._log.commits.get(version - 1)
        mark = commit.checkpoint if commit else None
        if mark is not None and mark.hold:
            self._hold(CheckpointId(step=version, id=mark.id), self._states[stage].layer_states(shown=False))
        if mark is not None and stage < len(mark.writers):
            self._begin(stage, CheckpointId(step=version, id=mark.id), mark.writers[stage])

    def keep_last(self, checkpoint: CheckpointId, writers: Sequence[Sequence[WorkerId]]) -> bool:
        """The coordinator asks for the last state, perhaps again. False if it is not here as others think it is."""
        if checkpoint != self._last:
            mine = [stage for stage, named in enumerate(writers) if self._plan.worker in named]
            if any(not self._is_here(stage, checkpoint.step) for stage in mine):
                return False
            self._last = checkpoint
            for stage in mine:
                self.finish(stage)
                self._begin(stage, checkpoint, writers[stage])
        return True

    def _is_here(self, stage: int, version: int) -> bool:
        return self._states.here(stage) is not None and self._states.version(stage) == version

    def _begin(self, stage: int, checkpoint: CheckpointId, writers: Sequence[WorkerId]) -> None:
        layers = share(writers, self._plan.worker, self._plan.current.state_layers[stage])
        if layers:
            began = self._clock()
            copying = self._states[stage].late_copies(layers)
            self._shares[stage] = _Share(checkpoint, copying, self._clock() - began)
            self._hand_over(stage)

    def advance(self) -> bool:
        """While there is nothing else to do: copy one piece more. False if there is none."""
        stage = next(iter(self._shares), None)
        if stage is None:
            return False
        self._shares[stage].copying.copy_piece()
        self._hand_over(stage)
        return True

    def finish(self, stage: int) -> None:
        """That stage's state is about to change."""
        found = self._shares.get(stage)
        if found is None:
            return
        began = self._clock()
        while not found.copying.done:
            found.copying.copy_piece()
        found.seconds += self._clock() - began
        self._hand_over(stage)

    def _hand_over(self, stage: int) -> None:
        if self._shares[stage].copying.done:
            done = self._shares.pop(stage)
            self._copied(stage)
            self._keep(done.checkpoint, done.copying.layers, done.seconds)
