"""Several optimizers as one: Muon for matrices and AdamW for all else, say."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Part = tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], Iterable[nn.Parameter]]


class Combined(torch.optim.Optimizer):
    """What its parts remember is in its own `state`, so it is copied, checked and kept as that of one optimizer is."""

    def __init__(self, parts: Iterable[Part], *, lr: float) -> None:
        """parts: what makes each optimizer, and its parameters; one without parameters is left out, as a stage may have
        none of a kind.

        lr: the rate of which that of each part is a multiple: a step's rate is the task's times the part's over this.
        """
        given = [(make, list(parameters)) for make, parameters in parts]
        self.parts = [make(parameters) for make, parameters in given if parameters]
        super().__init__([group for part in self.parts for group in part.param_groups], {"lr": lr})
        for part in self.parts:
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: Any = None) -> Any:
        """One of each part; None. closure: not used, as gradients are there."""
        for part in self.parts:
            part.step()
