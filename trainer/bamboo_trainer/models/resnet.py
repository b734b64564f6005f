"""ResNet-152, 101 and 50 for image classification: `bamboo_trainer.models.resnet:build`.

A layer is the stem, a bottleneck or the head.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer.models import settings
from bamboo_trainer.models.settings import numbers
from bamboo_trainer.task import Task, TrainingFacts

EXPANSION: Final = 4
_COMMON: Final = {"width": 64, "classes": 1000, "side": 224}
SIZES: Final[dict[str, dict[str, Any]]] = {
    "152": {**_COMMON, "blocks": "3 8 36 3"},
    "101": {**_COMMON, "blocks": "3 4 23 3"},
    "50": {**_COMMON, "blocks": "3 4 6 3"},
    "tiny": {"width": 4, "classes": 10, "side": 32, "blocks": "1 1 1 1"},
}


class Stem(nn.Module):
    """The first convolution, with pooling: [batch, 3, side, side] -> [batch, width, side / 4, side / 4]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.norm, self.pool = nn.BatchNorm2d(width), nn.MaxPool2d(3, stride=2, padding=1)
        _first_values(self)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.pool(F.relu(self.norm(self.convolution(x))))
        return out


class Bottleneck(nn.Module):
    """A bottleneck block: [batch, channels, h, w] -> [batch, 4 * inner, h / stride, w / stride]."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        out = EXPANSION * inner
        self.reduce, self.norm1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.middle = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.expand, self.norm3 = nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != out:
            convolution = nn.Conv2d(channels, out, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(out))
        _first_values(self)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.reduce(x)))
        inner = F.relu(self.norm2(self.middle(inner)))
        return F.relu(self.norm3(self.expand(inner)) + self.shortcut(x))


class ResNetHead(nn.Module):
    """Average pooling and the output layer: [batch, channels, h, w] -> logits [batch, classes]."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.out = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(x.mean(dim=(2, 3)))
        return logits


def build(config: Mapping[str, Any], training: TrainingFacts | None = None) -> Task:
    """Build a task that trains ResNet. config: task.config. Raises ValueError, naming the invalid key."""
    c = settings.read({"learningRate": 0.1, **config}, SIZES, "152")
    settings.whole_numbers(c, "width", "classes", "side")
    return settings.classifier(
        (partial(Stem, c["width"]), *_blocks(c), partial(ResNetHead, 8 * EXPANSION * c["width"], c["classes"])),
        c,
        training,
    )


def _blocks(c: Mapping[str, Any]) -> list[Callable[[], nn.Module]]:
    """Return factories of the blocks of four groups, each of which but the first begins by halving the side."""
    counts = numbers(c, "blocks", "four", "3 8 36 3")
    blocks: list[Callable[[], nn.Module]] = []
    channels = c["width"]
    for group, count in enumerate(counts):
        inner = c["width"] << group
        for number in range(count):
            blocks.append(partial(Bottleneck, channels, inner, 2 if group and not number else 1))
            channels = EXPANSION * inner
    return blocks


def _first_values(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
