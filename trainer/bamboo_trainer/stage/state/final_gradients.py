"""The input of a stage's optimizer step: the final gradient.

Frames carry it to replicas. It fits only a stage whose parameters lie in the same places.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from bamboo_trainer.stage.state.optimizer_state import OptimizerState
from bamboo_trainer.stage.state.parameters import FlatParameters, TiedSegment


class FinalGradients:
    """The form of a stage's final gradients, and what is computed from them without an optimizer.

    size: elements of the final gradient. gradient_size: elements of a gradient in which each layer's use of a tied
    parameter is still separate. buckets: places in the latter, which become final one after the other. tied: the tied
    groups whose layers' gradients this stage sums, by group.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        optimizer: OptimizerState,
        tied: Sequence[TiedSegment],
        elsewhere: Collection[int],
    ) -> None:
        """Create the form. elsewhere: the tied groups whose norms another stage reports."""
        self._parameters, self._optimizer, self._elsewhere = parameters, optimizer, frozenset(elsewhere)
        self.tied = tuple(tied)
        self.size, self.gradient_size = parameters.size, parameters.gradient_size
        self.buckets = tuple(bucket.place for bucket in parameters.buckets)

    def squared_norms(self, gradient: Tensor) -> Tensor:
        """Return the squared norm of each parameter's final gradient, unscaled, in fp64, in one tensor. Only its lowest
        stage includes a tied parameter; parameters that a decision has frozen are left out.
        """
        frozen = self._optimizer.frozen
        own = [slot for slot in self._parameters.slots if slot.group not in self._elsewhere]
        slots = [slot for slot in own if slot.name not in frozen]
        squares = [slot.of(gradient).double().square_().sum() for slot in slots]
        unscale = self._optimizer.unscale
        return torch.stack(squares) * unscale**2 if squares else gradient.new_empty(0, dtype=torch.float64)
