"""What a job does while it is measured: the time of each step, when enough is known, and whom to kill when."""

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from bamboo.bench.report import KillFound
from bamboo.terminal.view import QuietView, StopJob, TakeWorker, UserRequest
from bamboo_core.coordinator.events import Status, WorkerState
from bamboo_core.job.spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Enough:
    """When a job is measured well enough. warmup: steps that do not count; least, most: how many count; seconds: after
    which `least` of them are enough.
    """

    warmup: int
    least: int
    most: int
    seconds: float

    def reached(self, ends: list[float]) -> bool:
        """ends: of the steps so far, by a clock in seconds."""
        measured = len(ends) - self.warmup
        if measured < self.least:
            return False
        return measured >= self.most or ends[-1] - ends[self.warmup - 1] >= self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class KillPlan:
    """Workers that are killed without notice, one after the other, each when all stages are protected again.

    number: of them. calm: steps between two of them, at least. seed: of the stages and moments.
    """

    number: int
    calm: int
    seed: int = 0

    def place(self, number: int, stages: int) -> tuple[int, float]:
        """The stage whose worker is killed, and when in a step, as a share of a calm one."""
        generator = random.Random(f"{self.seed}:{number}")
        return generator.randrange(stages), generator.random()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Struck:
    """A worker that was killed. step: so many were committed before."""

    stage: int
    step: int
    moment: float


class StepRecorder(QuietView):
    """A run's view, which notes when steps are committed, and asks for its end or for a worker to be killed.

    ends: when each step was committed. losses: of each step. stopped: whether it has asked for the end.
    """

    def __init__(
        self, spec: JobSpec, enough: Enough, kills: KillPlan | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._spec, self._enough, self._kills, self._clock = spec, enough, kills, clock
        self._request: Callable[[UserRequest], None] = lambda request: None
        self._struck: list[_Struck] = []
        self._timer: asyncio.TimerHandle | None = None
        self._status: Status | None = None
        self._calm_since = 0  # the step from which on no worker was lost
        self.ends: list[float] = []
        self.losses: list[float] = []
        self.stopped = False

    def start(self, request: Callable[[UserRequest], None]) -> None:
        self._request = request

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def status(self, status: Status) -> None:
        self._status, now = status, self._clock()
        new = status.step - len(self.ends)
        if new <= 0:
            return
        self.ends += [now] * new
        known = status.losses[-new:]
        self.losses += known if len(known) == new else [float("nan")] * new
        if self._kills is not None:
            self._kill_when_calm(status, self._kills)
        if not self.stopped and status.step < self._spec.training.steps and self._enough.reached(self.ends):
            self.stopped = True
            self._request(StopJob())

    def _kill_when_calm(self, status: Status, plan: KillPlan) -> None:
        """After a commit."""
        if self._timer is not None or len(self._struck) >= plan.number:
            return
        if len(status.takeovers) < len(self._struck) or not _is_whole(status, self._spec):
            self._calm_since = status.step
        if status.step - self._calm_since < plan.calm or status.step + plan.calm > self._spec.training.steps:
            return
        stage, moment = plan.place(len(self._struck), self._spec.topology.stages)
        calm = statistics.median(self._calm_steps(status.step, plan.calm))
        self._timer = asyncio.get_running_loop().call_later(moment * calm, self._strike, stage, moment)

    def _calm_steps(self, step: int, number: int) -> list[float]:
        """Seconds of the last steps so far."""
        return [after - before for before, after in pairwise(self.ends[max(0, step - number) : step])]

    def _strike(self, stage: int, moment: float) -> None:
        self._timer, status = None, self._shown
        self._struck.append(_Struck(stage=stage, step=status.step, moment=moment))
        self._calm_since = status.step
        self._request(TakeWorker(status.grid[0][stage][0], notice=False))

    @property
    def _shown(self) -> Status:
        """The newest status."""
        assert self._status is not None
        return self._status

    @property
    def steps(self) -> tuple[float, ...]:
        """Seconds of each step that counts."""
        measured = self.ends[self._enough.warmup - 1 : self._enough.warmup + self._enough.most]
        return tuple(after - before for before, after in pairwise(measured))

    def kills(self) -> tuple[KillFound, ...]:
        """What came of the workers that were killed."""
        found = []
        for struck, takeover in zip(self._struck, self._shown.takeovers, strict=False):
            assert self._kills is not None
            before = self._calm_steps(struck.step, self._kills.calm)
            found.append(
                KillFound(
                    stage=struck.stage,
                    step=struck.step,
                    moment=struck.moment,
                    pause=takeover.pause_ms / 1000,
                    affected=self.ends[struck.step] - self.ends[struck.step - 1],
                    calm=statistics.median(before),
                )
            )
        return tuple(found)


def _is_whole(status: Status, spec: JobSpec) -> bool:
    """Is every stage protected, and every worker there that is wanted, ready for the next loss?"""
    protected = all(whole for pipeline in status.grid for _, whole in pipeline)
    standby = sum(state is WorkerState.STANDBY for _, state in status.workers)
    return protected and standby >= spec.standby.workers
