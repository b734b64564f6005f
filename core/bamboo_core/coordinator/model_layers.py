"""What a worker says of the model's layers, which is asked for once."""

from dataclasses import dataclass

from bamboo_core.coordinator.replacing import replace
from bamboo_core.planning.plan import WorkerId
from bamboo_core.planning.steps.layer_bytes import LayerBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayers:
    """asked: who is asked for it; None: nobody. costs: of layers, in operations; None until they are known. layers:
    their bytes; empty if nobody has said. memory: the least that a worker's device has, in bytes; None if not known.
    """

    asked: WorkerId | None = None
    costs: tuple[float, ...] | None = None
    layers: tuple[LayerBytes, ...] = ()
    memory: int | None = None

    def not_asked_of(self, worker: WorkerId) -> "ModelLayers":
        """The worker is gone, or its channel was closed: somebody is asked anew."""
        return replace(self, asked=None if self.asked == worker else self.asked)
