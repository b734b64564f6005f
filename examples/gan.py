"""A generative adversarial network whose layers lie in one pipeline: it learns to make points on a ring.

Two steps of the discriminator, then one of the generator, each with its own loss and optimizer. A step of the
discriminator takes made points and real ones, a step of the generator only made ones.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer import schedules
from bamboo_trainer.task import Parts, Phase, Task, phase

NOISE = 8


class Ring:
    """Points on a circle with a radius of 1, each by its number."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        angles = torch.tensor(indices) * (2 * math.pi / self._count)
        return (torch.stack([angles.cos(), angles.sin()], 1),), ()


class First(nn.Module):
    """The generator's first layer. Its noise depends on the seed, the step and the microbatch alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(NOISE, width)

    def forward(self, real: Tensor) -> Parts:
        hidden = self.linear(torch.randn(len(real), NOISE, device=real.device)).relu()
        return (hidden, real) if phase() == "discriminator" else (hidden,)


class Second(nn.Module):
    """The generator's second layer, which makes points."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, hidden: Tensor, *real: Tensor) -> Parts:
        return (self.inner(hidden), *real)


class Judge(nn.Module):
    """A layer of the discriminator, for made points and, if there are any, real ones."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, *points: Tensor) -> Parts:
        return tuple(self.inner(one) for one in points)


def discriminator_loss(outputs: Parts, targets: Parts) -> Tensor:
    made, real = outputs
    return F.softplus(made).mean() + F.softplus(-real).mean()


def generator_loss(outputs: Parts, targets: Parts) -> Tensor:
    return F.softplus(-outputs[0]).mean()


def optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in named], betas=(0.5, 0.99))


def build(config: Mapping[str, Any]) -> Task:
    width = int(config.get("width", 32))
    return Task(
        layers=(
            partial(First, width),
            partial(Second, width),
            lambda: Judge(nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Linear(width, width)),
            lambda: Judge(nn.LeakyReLU(0.2), nn.Linear(width, 1)),
        ),
        loss=generator_loss,
        dataset=Ring(1024),
        optimizer=optimizer,
        learning_rate=schedules.constant(2e-3),
        phases=(
            Phase(name="discriminator", trains=(2, 3), steps=2, loss=discriminator_loss),
            Phase(name="generator", trains=(0, 1)),
        ),
    )
