"""What a job is to do: its specification, which edits and what workers say of their data may change."""

from dataclasses import dataclass
from typing import Any

from bamboo_core.control import protocol
from bamboo_core.coordinator.replacing import replace
from bamboo_core.job.spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyEnd:
    """The job has fewer steps than the manifest says, as nothing has become better. why: a sentence without its end.
    wanted_steps: as many as the manifest says.
    """

    why: str
    wanted_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTerms:
    """secret: of the job's workers. history: URL of the job's history, which workers write; "" if none is kept.
    last_state: URL for the checkpoint of the last state of a job that keeps no others; "" if that is not kept.
    started: when the coordinator was made. heartbeat_timeout: seconds.

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
        """What a worker is told that has joined, or is back."""
        return protocol.Welcome(
            manifest=self.manifest, secret=self.secret, history=self.history, last_state=self.last_state
        )

    def with_steps(self, steps: int) -> "JobTerms":
        """The data of the first worker say how many steps an epoch has."""
        return replace(self, spec=self._of_steps(steps))

    def stopped_early(self, last: int, why: str) -> "JobTerms":
        """From now on the job has fewer steps, and ends like any other one that has so many."""
        wanted = self.early_stop.wanted_steps if self.early_stop else self.spec.training.steps
        return replace(self, spec=self._of_steps(last), early_stop=EarlyEnd(why=why, wanted_steps=wanted))

    def back_at(self, step: int) -> "JobTerms":
        """The job begins again before that step: whether it stops early is open again if it stopped after it."""
        stop = self.early_stop
        if stop is None or step >= self.spec.training.steps:
            return self
        return replace(self, spec=self._of_steps(stop.wanted_steps), early_stop=None)

    def _of_steps(self, steps: int) -> JobSpec:
        return replace(self.spec, training=replace(self.spec.training, steps=steps))
