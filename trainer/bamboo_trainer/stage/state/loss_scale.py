"""The scale of losses in fp16: a pure function of which steps had finite gradients.

The rule is that of `torch.amp.GradScaler` (after Micikevicius et al., Mixed Precision Training, 2018): half the scale,
and the step is skipped, when a gradient is not finite; twice the scale after GROWTH_INTERVAL good steps in a row.
Scales are powers of two, so multiplying and dividing by one keeps the bits.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Self

KIND: Final = "loss_scale"  # names are "loss_scale:3.scale": each layer has it, so that any split can restore it
INITIAL: Final = 2.0**16
GROWTH_INTERVAL: Final = 2000  # consecutive steps with finite gradients before the scale grows
GROWTH: Final = 2.0
BACKOFF: Final = 0.5
LARGEST: Final = 2.0**127  # GradScaler's is a float32
SMALLEST: Final = 2.0**-126
MOST_STEPS: Final = 2**31


@dataclass(frozen=True, slots=True)
class LossScale:
    """scale: of the next step. good: steps with finite gradients since it last changed."""

    scale: float
    good: int = 0

    @classmethod
    def first(cls) -> Self:
        return cls(INITIAL)

    def after(self, *, finite: bool) -> "LossScale":
        """Return the next step's scale. finite: all gradients of this step are finite."""
        if not finite:
            return LossScale(max(self.scale * BACKOFF, SMALLEST))
        if self.good + 1 < GROWTH_INTERVAL:
            return LossScale(self.scale, self.good + 1)
        return LossScale(min(self.scale * GROWTH, LARGEST))

    def numbers(self, layers: Collection[int]) -> dict[str, float | int]:
        """Return the numbers by name for the state of each of these layers."""
        numbers = {"good": self.good, "scale": self.scale}
        return {f"{KIND}:{layer}.{key}": value for layer in layers for key, value in numbers.items()}

    @classmethod
    def of_numbers(cls, given: Mapping[str, object], layers: Collection[int]) -> Self:
        """Undo `numbers`. Raises ValueError if the layers' scales differ or are invalid."""
        scales = {tuple(given.get(f"{KIND}:{layer}.{key}") for key in ("scale", "good")) for layer in layers}
        if len(scales) != 1:
            raise ValueError("the layers' states have different loss scales")
        ((scale, good),) = scales
        if type(scale) is not float or not SMALLEST <= scale <= LARGEST or math.frexp(scale)[0] != 0.5:
            raise ValueError(f"the loss scale must be a power of two, got {scale!r}")
        if type(good) is not int or not 0 <= good < MOST_STEPS:
            raise ValueError(f"the good steps of the loss scale must be a number of steps, got {good!r}")
        return cls(scale, good)
