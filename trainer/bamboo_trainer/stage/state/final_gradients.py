"""The input of a stage's optimizer step: the final gradient and the values of running buffers after the step.

Frames carry them to replicas. They fit only a stage whose parameters and buffers lie in the same places.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from bamboo_trainer.frames.payloads import Contributed
from bamboo_trainer.stage.contributions import Recorded, RunningBuffers
from bamboo_trainer.stage.state.optimizer_state import OptimizerState
from bamboo_trainer.stage.state.parameters import FlatParameters, TiedSegment
from bamboo_trainer.task import Parts


class FinalGradients:
    """The form of a stage's final gradients, and what is computed from them without an optimizer.

    size: elements of the final gradient. gradient_size: elements of a gradient in which each layer's use of a tied
    parameter is still separate. buckets: places in the latter, which become final one after the other. tied: the tied
    groups whose layers' gradients this stage sums, by group.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        running: RunningBuffers,
        optimizer: OptimizerState,
        tied: Sequence[TiedSegment],
        elsewhere: Collection[int],
        microbatches: int,
    ) -> None:
        """Create the form. elsewhere: the tied groups whose norms another stage reports. microbatches: of a step."""
        self._parameters, self._running, self._optimizer = parameters, running, optimizer
        self._elsewhere, self._microbatches = frozenset(elsewhere), microbatches
        self.tied = tuple(tied)
        self.size, self.gradient_size = parameters.size, parameters.gradient_size
        self.buckets = tuple(bucket.place for bucket in parameters.buckets)

    @property
    def running_size(self) -> int:
        """Bytes of all buffers that forwards contribute to."""
        return self._running.size

    def takes(self, final: Parts) -> bool:
        """Return whether they fit `StageValues.apply`: a gradient, and running buffers if the stage has any."""
        sizes = (self.size, self.running_size) if self._running else (self.size,)
        return tuple(part.numel() for part in final) == sizes

    def check_contributed(self, contributed: Contributed) -> None:
        """Raise ValueError if contributions of another pipeline's forwards do not fit this stage's running buffers."""
        self._running.check(contributed)

    def folded(self, contributions: Mapping[int, Recorded]) -> Parts:
        """Return the bytes of the running buffers after a step, from the contributions of all its microbatches; () if
        the stage has none.
        """
        return self._running.folded(contributions, self._microbatches)

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
