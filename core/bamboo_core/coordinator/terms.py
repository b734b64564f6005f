"""The job's terms: its spec, which edits and the data's length may change."""

from dataclasses import dataclass
from typing import Any

from bamboo_core.control import protocol
from bamboo_core.coordinator.replacing import replace
from bamboo_core.job.spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyEnd:
    """The early end of a job because its evaluations stopped improving.

    why: a clause. wanted_steps: the steps that the manifest asks for.
    """

    why: str
    wanted_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTerms:
    """The terms of a job that do not change while the coordinator runs it.

    secret: of the job's workers. history: URL of the job's history, which workers write; "" if none is kept.
    last_state: URL for the checkpoint of the last state of a job that keeps no others; "" if that is not kept. started:
    when the coordinator was made. heartbeat_timeout: seconds.

    early_stop: why the specification has fewer steps than the manifest.
    """

    spec: JobSpec
    manifest: dict[str, Any]
    secret: str
    history: str = ""
    last_state: str = ""
    started: float
    heartbeat_timeout: float
    early_stop: EarlyEnd | None = None

    def welcome(self) -> protocol.Welcome:
        """Return the message to a worker that has joined or reconnected."""
        return protocol.Welcome(
            manifest=self.manifest, secret=self.secret, history=self.history, last_state=self.last_state
        )

    def with_steps(self, steps: int) -> "JobTerms":
        """Set the number of steps, counted by the first worker from its data."""
        return replace(self, spec=self._of_steps(steps))

    def stopped_early(self, last: int, why: str) -> "JobTerms":
        """Shorten the job to `last` steps; it then ends like any other job of that length."""
        wanted = self.early_stop.wanted_steps if self.early_stop else self.spec.training.steps
        return replace(self, spec=self._of_steps(last), early_stop=EarlyEnd(why=why, wanted_steps=wanted))

    def back_at(self, step: int) -> "JobTerms":
        """Go back to the state before `step`, and undo an early stop after it."""
        stop = self.early_stop
        if stop is None or step >= self.spec.training.steps:
            return self
        return replace(self, spec=self._of_steps(stop.wanted_steps), early_stop=None)

    def _of_steps(self, steps: int) -> JobSpec:
        return replace(self.spec, training=replace(self.spec.training, steps=steps))
