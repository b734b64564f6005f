"""What a stage tells the one before it of an output that the loss does not depend on."""

from typing import Final

import torch
from torch import Tensor

NO_GRADIENT: Final = torch.empty(0, dtype=torch.bool)  # a gradient is of floats; this one travels in its place


def is_gradient(part: Tensor) -> bool:
    return part.dtype != torch.bool
