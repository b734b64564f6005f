"""Layers with known costs."""

from collections.abc import Callable

import torch
from torch import nn

from bamboo_trainer.data import TensorDataset
from bamboo_trainer.task import Task
from stage_kit import small_task

BATCH, LENGTH, WIDTH = 4, 16, 256


class First(nn.Module):
    """A recurrent layer that returns only its output sequence."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


class Chooses(nn.Module):
    """A layer whose output shape depends on the input's values. Raises ValueError for values that are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.isfinite().all():
            raise ValueError("made-up values")
        return self.one(x[x[:, 0, 0].abs() >= 0])


def recurrent() -> nn.Module:
    return First(nn.LSTM(WIDTH, WIDTH, batch_first=True))


def sequences(*layers: Callable[[], nn.Module], vocabulary: int = 50) -> Task:
    """Return a task that embeds token ids [BATCH, LENGTH] to [BATCH, LENGTH, WIDTH], and then runs `layers`."""
    samples = torch.zeros(20, LENGTH, dtype=torch.long)
    dataset = TensorDataset((samples,), (samples,))
    return small_task(layers=(lambda: nn.Embedding(vocabulary, WIDTH), *layers), dataset=dataset)


def products(inner: int, outer: int) -> int:
    """Count the floating-point operations of a linear layer, forward and backward, on BATCH * LENGTH vectors."""
    return 3 * 2 * BATCH * LENGTH * inner * outer
