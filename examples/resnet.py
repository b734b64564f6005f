"""ResNet-152, 101 and 50 as published, in one file: convolutions and BatchNorm, on made-up images (docs/models.md).

    bamboo run examples/resnet.yaml --preempt at:10:1 --verify

Replace `Images` with a dataset of your own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer.task import Parts, Task

BLOCKS = {"152": (3, 8, 36, 3), "101": (3, 4, 23, 3), "50": (3, 4, 6, 3), "tiny": (1, 1, 1, 1)}


class Images:
    """A dataset: image i is noise from a generator seeded with i; its class, i % classes, brightens one colour."""

    def __init__(self, samples: int, side: int, classes: int) -> None:
        self.samples, self.side, self.classes = samples, side, classes

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        shape, labels = (3, self.side, self.side), torch.tensor(indices) % self.classes
        images = torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in indices])
        images[range(len(indices)), labels % 3] += (1 + labels / self.classes)[:, None, None]
        return (images,), (labels,)


class Stem(nn.Module):
    """The first convolution and pooling: [batch, 3, side, side] -> [batch, width, side / 4, side / 4]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.norm, self.pool = nn.BatchNorm2d(width), nn.MaxPool2d(3, stride=2, padding=1)
        first_values(self)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.pool(F.relu(self.norm(self.convolution(x))))
        return out


class Bottleneck(nn.Module):
    """A residual bottleneck block: [batch, channels, h, w] -> [batch, 4 * inner, h / stride, w / stride]."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.reduce, self.norm1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.middle = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.expand, self.norm3 = nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != out:
            convolution = nn.Conv2d(channels, out, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(out))
        first_values(self)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.reduce(x)))
        inner = F.relu(self.norm2(self.middle(inner)))
        return F.relu(self.norm3(self.expand(inner)) + self.shortcut(x))


class Head(nn.Module):
    """Average pooling and the output layer: [batch, channels, h, w] -> logits [batch, classes]."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.out = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(x.mean(dim=(2, 3)))
        return logits


def first_values(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")


def build(config: Mapping[str, Any]) -> Task:
    width, classes, side = (4, 10, 32) if config["size"] == "tiny" else (64, 1000, 224)
    blocks: list[Callable[[], nn.Module]] = []
    channels, rate = width, float(config.get("learningRate", 0.1))
    for group, count in enumerate(BLOCKS[config["size"]]):
        for number in range(count):
            inner, stride = width << group, 2 if group and not number else 1
            blocks.append(partial(Bottleneck, channels, inner, stride))
            channels = 4 * inner
    return Task(
        layers=(partial(Stem, width), *blocks, partial(Head, channels, classes)),
        loss=loss,
        dataset=Images(512, side, classes),
        optimizer=partial(optimizer, rate),
        learning_rate=lambda step: rate,
    )


def loss(outputs: Parts, targets: Parts) -> Tensor:
    return F.cross_entropy(outputs[0], targets[0])


def optimizer(rate: float, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=rate, momentum=0.9)
