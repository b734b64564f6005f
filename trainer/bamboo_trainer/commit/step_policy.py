"""The policy for a step whose loss or gradients are not finite: a pure function of all cells' reports."""

import math
from dataclasses import dataclass
from typing import Final, Self

from bamboo_core.job.training_spec import NonFinite, Precision, TrainingSpec
from bamboo_trainer.task import Task
from bamboo_trainer.training import TrainingConfig, loss_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPolicy:
    """The treatment of steps that are not finite, and of losses.

    skips: leave out steps that are not finite. scales: losses are scaled, so gradients that are not finite may come
    from the scale alone. loss_unit: the divisor of summed losses before their backward.
    """

    skips: bool = False
    scales: bool = False
    loss_unit: float = 1.0

    @classmethod
    def of(cls, training: TrainingSpec, task: Task) -> Self:
        """Return the policy that a manifest asks for."""
        return cls(
            skips=training.non_finite is NonFinite.SKIP,
            scales=training.precision is Precision.FP16,
            loss_unit=loss_unit(task, TrainingConfig.of(training)),
        )

    def leaves_out(self, loss: float, norm: float) -> bool:
        """Return whether to skip the step. norm: of the gradient.

        The loss scale cannot make a forward overflow, so with scaling alone a loss that is not finite skips nothing.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            return False
        return self.skips or (self.scales and math.isfinite(loss))


APPLIES_ALL: Final = StepPolicy()
