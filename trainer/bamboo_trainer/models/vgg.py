"""VGG-19, 16 and 11 for image classification, without BatchNorm: `bamboo_trainer.models.vgg:build`.

A layer is a convolution with its ReLU, and with the pooling that may follow, or a linear layer.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer.models import settings
from bamboo_trainer.models.settings import Flat, numbers
from bamboo_trainer.task import Task, TrainingFacts

SIDE: Final = 7  # side of the linear layers' input
_COMMON: Final = {"width": 64, "inner": 4096, "classes": 1000, "side": 224, "dropout": 0.5}
SIZES: Final[dict[str, dict[str, Any]]] = {
    "19": {**_COMMON, "convolutions": "2 2 4 4 4"},
    "16": {**_COMMON, "convolutions": "2 2 3 3 3"},
    "11": {**_COMMON, "convolutions": "1 1 2 2 2"},
    "tiny": {"width": 2, "inner": 16, "classes": 10, "side": 32, "dropout": 0.5, "convolutions": "1 1 1 1 1"},
}


class VggConvolution(nn.Module):
    """A 3 x 3 convolution with ReLU: [batch, channels, h, w] -> [batch, out, h, w]; pool: half of h and w."""

    def __init__(self, channels: int, out: int, pool: bool) -> None:
        super().__init__()
        self.convolution, self.pool = nn.Conv2d(channels, out, 3, padding=1), pool
        nn.init.kaiming_normal_(self.convolution.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.convolution.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.convolution(x))
        return F.max_pool2d(x, 2) if self.pool else x


class VggHidden(nn.Module):
    """A hidden linear layer with ReLU and dropout: [batch, features] -> [batch, out]."""

    def __init__(self, features: int, out: int, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(features, out), nn.Dropout(dropout)
        nn.init.normal_(self.linear.weight, std=0.01)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(F.relu(self.linear(x)))
        return out


def build(config: Mapping[str, Any], training: TrainingFacts | None = None) -> Task:
    """Build a task that trains VGG. config: task.config. Raises ValueError, naming the invalid key."""
    c = settings.read({"learningRate": 0.01, **config}, SIZES, "19")
    settings.whole_numbers(c, "width", "inner", "classes", "side")
    return settings.classifier(
        (
            *_convolutions(c),
            partial(Flat, SIDE),
            partial(VggHidden, 8 * c["width"] * SIDE * SIDE, c["inner"], c["dropout"]),
            partial(VggHidden, c["inner"], c["inner"], c["dropout"]),
            partial(nn.Linear, c["inner"], c["classes"]),
        ),
        c,
        training,
    )


def _convolutions(c: Mapping[str, Any]) -> list[Callable[[], nn.Module]]:
    """Return factories of the convolutions of five groups, with pooling at the end of each group."""
    counts = numbers(c, "convolutions", "five", "2 2 4 4 4")
    convolutions: list[Callable[[], nn.Module]] = []
    channels = 3
    for group, count in enumerate(counts):
        out = c["width"] << min(group, 3)
        for number in range(count):
            convolutions.append(partial(VggConvolution, channels, out, number == count - 1))
            channels = out
    return convolutions
