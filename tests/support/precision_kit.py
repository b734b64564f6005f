"""A task for tests of bf16 parameters: it has a frozen bias, and may fuse its optimizer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from bamboo_trainer.task import Task
from stage_kit import small_task


class Frozen(nn.Linear):
    """A linear layer whose bias is not trained."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.bias.requires_grad_(False)


def build(config: Mapping[str, Any]) -> Task:
    return small_task(
        layers=(lambda: nn.Linear(2, 3), Frozen, nn.Tanh, lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.05, fused=config.get("fused", False)),
        learning_rate=lambda step: 0.05 / (step + 1),
    )
