"""What becomes of a step whose loss or gradients are not finite: a pure function of what all cells have reported."""

import math
from dataclasses import dataclass
from typing import Final, Self

from bamboo_core.job.training_spec import NonFinite, Precision, TrainingSpec
from bamboo_trainer.task import Task
from bamboo_trainer.training import TrainingConfig, loss_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPolicy:
    """skips: steps that are not finite, instead of applying them.

    scales: losses are scaled, so gradients that are not finite tell of the scale, and not of the training.
    loss_unit: by what losses that are sums were divided for their backward.
    """

    skips: bool = False
    scales: bool = False
    loss_unit: float = 1.0

    @classmethod
    def of(cls, training: TrainingSpec, task: Task) -> Self:
        """What a manifest says of it."""
        return cls(
            skips=training.non_finite is NonFinite.SKIP,
            scales=training.precision is Precision.FP16,
            loss_unit=loss_unit(task, TrainingConfig.of(training)),
        )

    def leaves_out(self, loss: float, norm: float) -> bool:
        """Is the model to stay as it is? norm: of the gradient.

        What the forward overflows in has nothing to do with the scale, so a loss that is not finite is no reason of its
        own to skip a step.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            return False
        return self.skips or (self.scales and math.isfinite(loss))


APPLIES_ALL: Final = StepPolicy()
