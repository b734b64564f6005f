"""VGG-19 and one-column AlexNet, as tasks for `bench/profiles.py` and `bench/layer_counts.py`. Nothing trains them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer.data import TensorDataset
from bamboo_trainer.task import Parts, Task

HIDDEN, CLASSES, SAMPLES = 4096, 1000, 8


def vgg(config: Mapping[str, Any]) -> Task:
    convolutions = []
    channels = 3
    for out, count in zip((64, 128, 256, 512, 512), (2, 2, 4, 4, 4), strict=True):
        for number in range(count):
            pool = nn.MaxPool2d(2) if number == count - 1 else nn.Identity()
            convolutions.append(partial(_convolution, channels, out, 3, 1, 1, pool))
            channels = out

    def hidden(features: int) -> nn.Module:
        return nn.Sequential(nn.Linear(features, HIDDEN), nn.ReLU(), nn.Dropout())

    return _classifier(convolutions, 7, channels, hidden)


def alexnet(config: Mapping[str, Any]) -> Task:
    pool, none = nn.MaxPool2d(3, stride=2), nn.Identity()
    convolutions = [
        partial(_convolution, 3, 64, 11, 4, 2, pool),
        partial(_convolution, 64, 192, 5, 1, 2, pool),
        partial(_convolution, 192, 384, 3, 1, 1, none),
        partial(_convolution, 384, 256, 3, 1, 1, none),
        partial(_convolution, 256, 256, 3, 1, 1, pool),
    ]

    def hidden(features: int) -> nn.Module:
        return nn.Sequential(nn.Dropout(), nn.Linear(features, HIDDEN), nn.ReLU())

    return _classifier(convolutions, 6, 256, hidden)


def _convolution(channels: int, out: int, kernel: int, stride: int, padding: int, pool: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, out, kernel, stride, padding), nn.ReLU(), pool)


def _classifier(
    convolutions: Sequence[Callable[[], nn.Module]], side: int, channels: int, hidden: Callable[[int], nn.Module]
) -> Task:
    """Return an image classifier as a task. side: pooled images' width. hidden: makes a hidden layer of n inputs."""
    images, labels = torch.zeros(SAMPLES, 3, 224, 224), torch.zeros(SAMPLES, dtype=torch.int64)
    return Task(
        layers=(
            *convolutions,
            lambda: nn.Sequential(nn.AdaptiveAvgPool2d(side), nn.Flatten()),
            partial(hidden, channels * side * side),
            partial(hidden, HIDDEN),
            partial(nn.Linear, HIDDEN, CLASSES),
        ),
        loss=_loss,
        dataset=TensorDataset((images,), (labels,)),
        optimizer=_optimizer,
        learning_rate=lambda step: 0.01,
    )


def _loss(outputs: Parts, targets: Parts) -> Tensor:
    return F.cross_entropy(outputs[0], targets[0])


def _optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.01, momentum=0.9)
