"""A stage's state as a worker holds it."""

from dataclasses import dataclass, field

from torch import Tensor

from bamboo.plan import WorkerId
from bamboo_trainer.stage.stage import Stage


@dataclass(slots=True)
class Holding:
    """A stage's state on this worker (None while it is on its way), and final gradients not yet applied.

    sums: of the newest versions that are compared; claims: those of others at versions that are not reached here yet.
    """

    stage: Stage | None
    reduced: dict[int, Tensor] = field(default_factory=dict)
    owned: bool = False
    rehearsed: bool = False
    sums: dict[int, dict[str, int]] = field(default_factory=dict)
    claims: dict[int, dict[WorkerId, bytes]] = field(default_factory=dict)

    def give(self, owned: bool, on_host: bool) -> None:
        """It is this worker's to run, or only to keep for another one. on_host: then in host memory."""
        self.owned = owned
        if self.stage:
            self.stage.park(on_host and not owned)

    @property
    def version(self) -> int:
        return self.stage.version if self.stage else -1
