"""What a cell has computed of a step so far, and what crosses the boundary between two stages."""

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn

from bamboo_trainer.stage.contributions import Recorded
from bamboo_trainer.stage.gradient_sum import GradientSum
from bamboo_trainer.task import Parts
from bamboo_trainer.tasks.evaluation import Weighted

# What a stage tells the one before it of an output that the loss does not depend on: a gradient is of floats.
NO_GRADIENT: Final = torch.empty(0, dtype=torch.bool)


def is_gradient(part: Tensor) -> bool:
    return part.dtype != torch.bool


@dataclass(slots=True, eq=False)
class Work:
    """One cell's work on one step: the gradient so far, what the backwards need, and what the forwards came to."""

    gradients: GradientSum
    contexts: dict[int, tuple[Parts, Parts]] = field(default_factory=dict)  # microbatch -> (inputs, outputs or loss)
    losses: dict[int, float] = field(default_factory=dict)
    contributions: dict[int, Recorded] = field(default_factory=dict)  # to running buffers
    evaluated: dict[int, dict[str, Weighted]] = field(default_factory=dict)  # of a last stage: by batch and metric


@dataclass(slots=True, eq=False)
class Forwarding:
    """A forward on its way through the layers; `parts` are the outputs so far, at the end the stage's or the loss."""

    step: int
    microbatch: int
    leaves: Parts
    parts: Parts
    layer: int  # the next one
    end: int
    targets: Parts | None = None  # if they were read with the inputs
    on_host: bool = False  # what the backward will need waits in host memory
    contributed: list[tuple[nn.Module, Parts]] = field(default_factory=list)  # to running buffers, in order

    @property
    def done(self) -> bool:
        return self.layer == self.end
