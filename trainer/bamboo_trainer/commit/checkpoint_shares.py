"""Which layers this worker writes of a state that is kept, and the copy of them, taken when it has that state."""

from collections.abc import Callable, Mapping

from bamboo.planning.plan import CheckpointId
from bamboo.planning.shares import share
from bamboo_trainer.commit.commit_log import CommitLog
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.layer_state import LayerState
from bamboo_trainer.stage.stage_states import StageStates

Keep = Callable[[CheckpointId, Mapping[int, LayerState], float], None]
Hold = Callable[[CheckpointId, Mapping[int, LayerState]], None]


class CheckpointShares:
    """Without a state of its own.

    keep: takes copies, and the seconds that they took; it does the rest elsewhere. hold: takes copies of a cut.
    """

    def __init__(
        self,
        plan: PlanState,
        states: StageStates,
        log: CommitLog,
        keep: Keep,
        hold: Hold,
        clock: Callable[[], float],
    ) -> None:
        self._plan, self._states, self._log, self._clock = plan, states, log, clock
        self._keep, self._hold = keep, hold

    def reached(self, stage: int) -> None:
        """A stage that is held here has come to another version, by itself or with another worker's state."""
        version = self._states.version(stage)
        commit = self._log.commits.get(version - 1)
        mark = commit.checkpoint if commit else None
        if mark is not None and mark.hold:
            self._hold(CheckpointId(step=version, id=mark.id), self._states[stage].layer_states(shown=False))
        if mark is None or stage >= len(mark.writers):
            return
        layers = share(mark.writers[stage], self._plan.worker, self._plan.current.stages[stage])
        if layers:
            began = self._clock()
            copies = self._states[stage].layer_states(layers)
            self._keep(CheckpointId(step=version, id=mark.id), copies, self._clock() - began)
