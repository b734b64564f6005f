"""Dynamic loss scaling for fp16: the scale is a pure function of which steps had finite gradients.

The rule is that of `torch.amp.GradScaler` (after Micikevicius et al., Mixed Precision Training, 2018): when a gradient
is not finite, the scale is halved and the step skipped; after GROWTH_INTERVAL finite steps in a row, it is doubled,
within limits. Scales are powers of two, so scaling rounds nothing, except for numbers that overflow or underflow.
"""

import math
from dataclasses import dataclass
from typing import Final

INITIAL: Final = 2.0**16
GROWTH_INTERVAL: Final = 2000  # consecutive steps with finite gradients before the scale grows
GROWTH: Final = 2.0
BACKOFF: Final = 0.5
LARGEST: Final = 2.0**127  # GradScaler's is a float32
SMALLEST: Final = 2.0**-126


@dataclass(frozen=True, slots=True)
class LossScale:
    """The scale of losses. scale: for the next step. good: finite steps in a row that count for the next growth."""

    scale: float
    good: int = 0

    def __post_init__(self) -> None:
        if not SMALLEST <= self.scale <= LARGEST or math.frexp(self.scale)[0] != 0.5:
            raise ValueError(f"the loss scale must be a power of two, got {self.scale!r}")

    def after(self, *, finite: bool) -> "LossScale":
        """Return the scale after one more step. finite: all gradients of that step are finite."""
        if not finite:
            return LossScale(max(self.scale * BACKOFF, SMALLEST))
        if self.good + 1 < GROWTH_INTERVAL:
            return LossScale(self.scale, self.good + 1)
        return LossScale(min(self.scale * GROWTH, LARGEST))
