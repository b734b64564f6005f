"""Preemptions that strike in the middle of a step: whom, and when its time has come. No clock, no I/O.

In the steps that are concerned every worker asks before each forward and backward (`Pool`,
`bamboo_trainer.worker.strike_gate`), so a worker can be taken away after exactly as many of them as was planned, on a
machine of any speed.
"""

from dataclasses import dataclass

from bamboo.local.preempt import Preemption
from bamboo.plan import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """Take that worker once it has done `after` forwards and backwards of the step."""

    worker: WorkerId
    action: Preemption
    step: int
    after: int

    @property
    def where(self) -> str:
        return f", in the middle of step {self.step}"


class Strikes:
    """Keeps what is aimed at, and how far the workers are."""

    def __init__(self) -> None:
        self._aims: list[Aim] = []
        self._begun: dict[WorkerId, tuple[int, int]] = {}  # the step, and how many instructions of it

    @property
    def aimed_at(self) -> frozenset[WorkerId]:
        return frozenset(aim.worker for aim in self._aims)

    def aim(self, aim: Aim) -> None:
        self._aims.append(aim)

    def begins(self, worker: WorkerId, step: int) -> None:
        """The worker is about to begin its next forward or backward, which is of that step."""
        before, count = self._begun.get(worker, (step, 0))
        self._begun[worker] = (step, count + 1 if before == step else 1)

    def due(self, step: int) -> tuple[Aim, ...]:
        """Whose place is reached, or missed because that step, or the worker's part in it, is over; each once.

        step: the job's, which is in progress.
        """
        found = tuple(aim for aim in self._aims if step > aim.step or self._reached(aim))
        self._aims = [aim for aim in self._aims if aim not in found]
        return found

    def _reached(self, aim: Aim) -> bool:
        step, count = self._begun.get(aim.worker, (-1, 0))
        return step > aim.step or (step == aim.step and count > aim.after)
