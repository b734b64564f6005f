"""What a coordinator knows of the job's end: why it is to come, who has finished, and the final weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bamboo_core.coordinator.replacing import replace
from bamboo_core.planning.plan import Cell, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """How the job is to end as soon as a state of that many steps or more is kept.

    since: when that was said. unheard: workers have to come back to a restarted coordinator before.
    """

    reason: str
    message: str
    step: int
    since: float
    unheard: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSaving:
    """One saving: all stages of one split of the layers, in one state.

    number: no other saving of the job has it, whichever coordinator began that. stages: so many. asked: of each stage,
    who was asked last to write it. written: stages. committing: who was asked last to make the folder of all of them.
    """

    number: int
    stages: int
    asked: Mapping[int, WorkerId] = field(default_factory=dict)
    written: frozenset[int] = frozenset()
    committing: WorkerId | None = None

    def asked_again(self, worker: WorkerId) -> "WeightsSaving":
        """What that worker was asked for may not have reached it, nor its answer us."""
        asked = {stage: other for stage, other in self.asked.items() if other != worker}
        return replace(self, asked=asked, committing=None if self.committing == worker else self.committing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """stopping: the job is to end before its last step. finished: cells whose last state is there, with its digest;
    finishers: who said so last of each. saving: of the final weights, in the phase of that name.
    """

    stopping: Stopping | None = None
    finished: tuple[tuple[Cell, str], ...] = ()
    finishers: Mapping[Cell, WorkerId] = field(default_factory=dict)
    saving: WeightsSaving | None = None

    def with_finished(self, cell: Cell, digest: str, worker: WorkerId) -> "Ending":
        finished = {**dict(self.finished), cell: digest}
        return replace(self, finished=tuple(sorted(finished.items())), finishers={**self.finishers, cell: worker})

    def asked_again(self, worker: WorkerId) -> "Ending":
        """The worker's channel was closed for a while."""
        return self if self.saving is None else replace(self, saving=self.saving.asked_again(worker))

    def given_up(self) -> int | None:
        """If the job ends now: the number of a saving whose files nobody will use. Once all stages are written somebody
        may be making the folder of them.
        """
        saving = self.saving
        return saving.number if saving and len(saving.written) < saving.stages else None
