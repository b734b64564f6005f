"""Plain modules."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import plain_models
from bamboo_trainer.data import TensorDataset


def small() -> dict[str, Any]:
    data = TensorDataset((torch.rand(8, 4),), (torch.rand(8, 4),))
    return {"dataset": data, "loss": nn.MSELoss(), "optimizer": plain_models.optimizer, "learning_rate": 0.1}


def model_of(forward: Callable[[Any, Tensor], Any], block: Callable[[], nn.Module] = lambda: nn.Linear(4, 4)) -> Any:
    """A class with a list of three blocks, and that forward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.blocks = nn.LayerNorm(4), nn.ModuleList(block() for _ in range(3))

        def forward(self, x: Tensor) -> Any:
            return forward(self, x)

    return Model


class Cache:
    """A cache of a kind that nobody knows."""


class TwoArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Any) -> Tensor:
        return self.linear(x) + (0 if isinstance(other, Cache) else other)
