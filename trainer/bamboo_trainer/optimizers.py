"""`Combined`: several optimizers as one, such as Muon for matrices and AdamW for all other parameters."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Part = tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], Iterable[nn.Parameter]]


class Combined(torch.optim.Optimizer):
    """An optimizer made of several optimizers. It keeps their state in its own `state`, so that the state is copied,
    checked and saved like one optimizer's.
    """

    def __init__(self, parts: Iterable[Part], *, lr: float) -> None:
        """Create the optimizer.

        parts: for each optimizer, the function that makes it, and its parameters; an optimizer without parameters is
        left out, because a stage may have none for it.

        lr: base rate; in a step, a part's rate is its own `lr` times the task's learning rate divided by the base rate.
        """
        given = [(make, list(parameters)) for make, parameters in parts]
        self.parts = [make(parameters) for make, parameters in given if parameters]
        super().__init__([group for part in self.parts for group in part.param_groups], {"lr": lr})
        for part in self.parts:
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: Any = None) -> Any:
        """Take a step with each part; return None. closure: ignored, since the gradients are already computed."""
        for part in self.parts:
            part.step()
