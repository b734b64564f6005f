"""Shared parts of the library's image classifiers."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer.task import Parts


class Flat(nn.Module):
    """[batch, channels, h, w] -> [batch, channels * side * side], averaged to that side."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, self.side).flatten(1)


def numbers(c: Mapping[str, Any], key: str, count: str, example: str) -> list[int]:
    """Return the whole numbers, at least 1, in the config's text, as many as in the example. count: a word for that.

    Raises ValueError, naming the key and what was expected.
    """
    words = c[key].split()
    values = [int(word) for word in words if word.isdecimal()]
    if not len(values) == len(words) == len(example.split()) or min(values) < 1:
        raise ValueError(f'{key} must be {count} numbers such as "{example}", got {c[key]!r}')
    return values


def loss(outputs: Parts, targets: Parts) -> Tensor:
    return F.cross_entropy(outputs[0], targets[0])
