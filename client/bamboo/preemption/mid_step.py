"""Preemptions in the middle of a step: which worker, and when. No clock, no I/O.

In such steps every worker asks before each forward and backward (`ForkServer`,
`bamboo_trainer.worker.process`), so that it can be taken away after the planned number of them, on a machine
of any speed.
"""

from dataclasses import dataclass

from bamboo.preemption.scheduling import Preemption
from bamboo_core.planning.plan import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class MidStepPreemption:
    """A preemption of that worker after `after` forwards and backwards of the step that follows `step`
    committed ones.
    """

    worker: WorkerId
    action: Preemption
    step: int
    after: int

    @property
    def where(self) -> str:
        return f", in the middle of step {self.step + 1}"


class MidStepPreemptions:
    """Planned preemptions, and each worker's position in its step."""

    def __init__(self) -> None:
        self._planned: list[MidStepPreemption] = []
        self._begun: dict[WorkerId, tuple[int, int]] = {}  # the step, and how many forwards and backwards of it

    @property
    def targets(self) -> frozenset[WorkerId]:
        return frozenset(planned.worker for planned in self._planned)

    def add(self, planned: MidStepPreemption) -> None:
        self._planned.append(planned)

    def begins(self, worker: WorkerId, step: int) -> None:
        """Record that the worker is about to begin its next forward or backward of that step."""
        before, count = self._begun.get(worker, (step, 0))
        self._begun[worker] = (step, count + 1 if before == step else 1)

    def due(self, step: int) -> tuple[MidStepPreemption, ...]:
        """Return each preemption once, when its moment has come, or when the step or the worker's share of it is over.

        step: the job's current step.
        """
        found = tuple(planned for planned in self._planned if step > planned.step or self._reached(planned))
        self._planned = [planned for planned in self._planned if planned not in found]
        return found

    def _reached(self, planned: MidStepPreemption) -> bool:
        step, count = self._begun.get(planned.worker, (-1, 0))
        return step > planned.step or (step == planned.step and count > planned.after)
