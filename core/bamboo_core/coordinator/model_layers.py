"""Sizes and costs of the model's layers, which the coordinator asks one worker for."""

from dataclasses import dataclass

from bamboo_core.coordinator.replacing import replace
from bamboo_core.planning.plan import WorkerId
from bamboo_core.planning.steps.layer_bytes import LayerBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayers:
    """The layers of the model, as far as known.

    asked: the worker that was asked; None: none. costs: operations of each layer; None until known. layers: their
    bytes; empty if unknown. memory: bytes of the smallest device; None if unknown.
    """

    asked: WorkerId | None = None
    costs: tuple[float, ...] | None = None
    layers: tuple[LayerBytes, ...] = ()
    memory: int | None = None

    def not_asked_of(self, worker: WorkerId) -> "ModelLayers":
        """Forget a request to a worker that is gone or whose channel closed, so that another one is asked."""
        return replace(self, asked=None if self.asked == worker else self.asked)
