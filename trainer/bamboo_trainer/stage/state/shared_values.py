"""What a stage has for the shards of the optimizer's state (`planning.shards`): its values by layer, and memory that it
shares with another stage.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from bamboo_trainer.memory.saved_tensors import new_bytes
from bamboo_trainer.stage.constants import Constants
from bamboo_trainer.stage.contributions import RunningBuffers
from bamboo_trainer.stage.state import layer_state, snapshot
from bamboo_trainer.stage.state.optimizer_state import OptimizerState
from bamboo_trainer.stage.state.parameters import FlatParameters
from bamboo_trainer.task import Parts
from bamboo_trainer.tasks.mixed_precision import forget_casts


class SharedValues:
    """Of a stage: either a shard, or the whole model, which follows the shards."""

    version: int
    _layers: Mapping[int, nn.Module]
    _parameters: FlatParameters
    _optimizer_state: OptimizerState
    _running: RunningBuffers
    _constants: Constants
    _shared: frozenset[str]
    _state_bytes: tuple[int, int] | None
    _digest: str | None

    def values(self, layers: tuple[int, int], *, fixed: bool = False) -> list[Tensor]:
        """What these layers hold and steps change, or fixed: what none changes; the tensors themselves, in fixed order.

        A tied parameter is a value of its group's first layer. layers: half-open range.
        """
        running = {f"constant:{index}.{name}" for index, name in self._running.places()}
        return [
            tensor
            for name, tensor in self._parameters.named()
            if layers[0] <= layer_state.layer_of(name) < layers[1]
            and (name.startswith("constant:") and name not in running) == fixed
        ]

    def part_for(self, shard: "SharedValues", final: Parts) -> Parts:
        """Of this stage's final gradient and running buffers what a stage of some of its layers takes to `apply`."""
        gradient, *running = final
        part = self._parameters.part_of(gradient, shard._parameters)
        return (part, *(self._running.part_of(values, shard._running) for values in running if shard._running))

    def share(self, other: "SharedValues | None") -> None:
        """Have the memory of another stage's parameters, which are at the same version; None: memory of one's own.

        A tied parameter of another layer is updated here as well, and so keeps its memory.
        """
        if other is None and not self._shared:
            return
        own = (name for name, _ in self._parameters.named() if layer_state.layer_of(name) in self._layers)
        names = list(own) if other is not None else []
        self._parameters.share(None if other is None else other._parameters, frozenset(names))
        self._shared, self._state_bytes = frozenset(names), None
        self._constants.renew()

    @property
    def shares(self) -> bool:
        """Does it have another stage's memory for its parameters?"""
        return bool(self._shared)

    def follow(self, like: "SharedValues", values: Iterable[tuple[Tensor, Tensor]], *, begins: bool) -> None:
        """Go to another stage's version. values: this one's, and what they are then. begins: for the first time."""
        if not begins:
            self._constants.check()
        with torch.no_grad():
            for own, value in values:
                if own.data_ptr() != value.data_ptr():
                    own.copy_(value)
        if begins:
            self._constants.renew()
        else:
            self._constants.renew_running()
        self._parameters.unbind()
        forget_casts()
        self._optimizer_state.loss_scale = like._optimizer_state.loss_scale
        self._digest, self.version = None, like.version

    def state_sum(self) -> int:
        """64 bits of parameters, buffers and what the optimizer remembers; equal bits give equal sums."""
        return snapshot.state_sum(self._parameters, self._optimizer_state)

    def state_bytes(self) -> tuple[int, int]:
        """Of what the layers hold, without what they share, and of what the optimizer remembers."""
        if self._state_bytes is None:
            shared = self._shared
            own = (t for n, t in self._parameters.named() if n not in shared or not isinstance(t, nn.Parameter))
            held = new_bytes(own, set())
            self._state_bytes = held, sum(tensor.nbytes for _, tensor in self._optimizer_state.named())
        return self._state_bytes
