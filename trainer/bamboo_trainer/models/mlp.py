"""A residual MLP that classifies the points of two noisy spirals: `bamboo_trainer.models.mlp:build`.

Its layers pass a pair of tensors: the hidden state and the points themselves, which every block gets again.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer.data import TensorDataset
from bamboo_trainer.data.config_keys import arguments, camel
from bamboo_trainer.task import Parts, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig:
    width: int = 64
    blocks: int = 6
    samples: int = 4096
    noise: float = 0.05
    turns: float = 1.5
    learning_rate: float = 0.05
    momentum: float = 0.9

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 1 if type(value) is int else 0
            if value < least:
                raise ValueError(f"{camel(name)} must be at least {least}, got {value}")
        if not self.learning_rate:
            raise ValueError("learningRate must be positive, got 0.0")


class Lift(nn.Module):
    """The input layer: points [batch, 2] -> (hidden [batch, width], points)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, width)

    def forward(self, points: Tensor) -> Parts:
        return self.linear(points), points


class Residual(nn.Module):
    """A residual block, which also sees the points. Inputs and outputs: (hidden [batch, width], points [batch, 2])."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width + 2, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, parts: Parts) -> Parts:
        hidden, points = parts
        inner = F.silu(self.up(torch.cat([self.norm(hidden), points.to(hidden.dtype)], dim=-1)))
        return hidden + self.down(inner), points


class Classifier(nn.Module):
    """The output layer: (hidden, points) -> logits [batch, 2]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2)

    def forward(self, parts: Parts) -> Tensor:
        logits: Tensor = self.linear(parts[0])
        return logits


def build(config: Mapping[str, Any]) -> Task:
    """Build a task that trains an MLP. config: task.config. Raises ValueError, naming the invalid key."""
    parsed = MlpConfig(**arguments(MlpConfig, config))
    blocks: list[Callable[[], nn.Module]] = [partial(Residual, parsed.width)] * parsed.blocks
    dataset = spirals(parsed.samples, parsed.noise, parsed.turns, seed=0)
    return Task(
        layers=(partial(Lift, parsed.width), *blocks, partial(Classifier, parsed.width)),
        loss=_loss,
        dataset=dataset,
        optimizer=partial(_optimizer, parsed),
        learning_rate=lambda _: parsed.learning_rate,
    )


def spirals(samples: int, noise: float, turns: float, seed: int) -> TensorDataset:
    """Return a dataset of points of two interleaved spirals. Inputs: float32 [samples, 2]. Targets: int64 [samples],
    each point's spiral, 0 or 1. noise: standard deviation. turns: number of turns of each spiral.
    """
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(samples) % 2
    radius = torch.rand(samples, generator=generator).sqrt()
    angle = 2 * math.pi * turns * radius + math.pi * label
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset((points + noise * torch.randn(samples, 2, generator=generator),), (label,))


def _loss(outputs: Parts, targets: Parts) -> Tensor:
    return F.cross_entropy(outputs[0], targets[0])


def _optimizer(config: MlpConfig, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=config.learning_rate, momentum=config.momentum)
