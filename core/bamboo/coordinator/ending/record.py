"""What a coordinator knows of the final weights while they are written."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bamboo.planning.plan import WorkerId


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


def given_up(saving: WeightsSaving | None) -> int | None:
    """If the job ends now: the number of a saving whose files nobody will use. Once all stages are written somebody may
    be making the folder of them.
    """
    return saving.number if saving and len(saving.written) < saving.stages else None
