"""A small task around a given layer, and a layer that changes its own state, for tests of repeatability."""

import torch
from torch import nn

from stage_kit import small_task


def between(layer) -> object:
    """Return a small task of three layers: a linear one, the one that `layer()` makes, and another linear one."""
    return small_task(layers=(lambda: nn.Linear(2, 3), layer, lambda: nn.Linear(3, 2)))


class Late(nn.Module):
    """A layer that changes its own state in one forward call, by `act(layer)`. at: the number of that call, from 1."""

    def __init__(self, act, at: int) -> None:
        super().__init__()
        self.act, self.at, self.calls = act, at, 0
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("cache", None)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at:
            with torch.no_grad():
                self.act(self)
        return x * self.weight
