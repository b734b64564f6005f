"""AlexNet for image classification, the variant with one column: `bamboo_trainer.models.alexnet:build`."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer.models import settings
from bamboo_trainer.models.settings import Flat, numbers
from bamboo_trainer.task import Task, TrainingFacts

SIDE: Final = 6  # side of the linear layers' input
SIZES: Final[dict[str, dict[str, Any]]] = {
    "full": {"channels": "64 192 384 256 256", "inner": 4096, "classes": 1000, "side": 224, "dropout": 0.5},
    "tiny": {"channels": "4 6 8 6 6", "inner": 16, "classes": 10, "side": 64, "dropout": 0.5},
}
_CONVOLUTIONS: Final = ((11, 4, 2, True), (5, 1, 2, True), (3, 1, 1, False), (3, 1, 1, False), (3, 1, 1, True))


class AlexNetConvolution(nn.Module):
    """A convolution with ReLU. kind: side of the kernel, stride, padding, and whether max pooling follows."""

    def __init__(self, channels: int, out: int, kind: tuple[int, int, int, bool]) -> None:
        super().__init__()
        kernel, stride, padding, self.pool = kind
        self.convolution = nn.Conv2d(channels, out, kernel, stride=stride, padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.convolution(x))
        return F.max_pool2d(x, 3, stride=2) if self.pool else x


class AlexNetHidden(nn.Module):
    """A hidden linear layer with ReLU, after dropout: [batch, features] -> [batch, out]."""

    def __init__(self, features: int, out: int, dropout: float) -> None:
        super().__init__()
        self.dropout, self.linear = nn.Dropout(dropout), nn.Linear(features, out)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(self.dropout(x)))


def build(config: Mapping[str, Any], training: TrainingFacts | None = None) -> Task:
    """Build a task that trains AlexNet. config: task.config. Raises ValueError, naming the invalid key."""
    c = settings.read({"learningRate": 0.01, **config}, SIZES, "full")
    settings.whole_numbers(c, "inner", "classes", "side")
    outs = numbers(c, "channels", "five", "64 192 384 256 256")
    pairs = zip((3, *outs), outs, _CONVOLUTIONS, strict=False)
    return settings.classifier(
        (
            *(partial(AlexNetConvolution, channels, out, kind) for channels, out, kind in pairs),
            partial(Flat, SIDE),
            partial(AlexNetHidden, outs[-1] * SIDE * SIDE, c["inner"], c["dropout"]),
            partial(AlexNetHidden, c["inner"], c["inner"], c["dropout"]),
            partial(nn.Linear, c["inner"], c["classes"]),
        ),
        c,
        training,
    )
