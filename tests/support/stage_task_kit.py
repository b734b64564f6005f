"""Layers with various forward signatures, and a dataset that counts its batches, for tests on a chain of stages."""

from torch import nn

from bamboo_trainer.data import TensorDataset


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(x), x


class Several(Pairs):
    def forward(self, x, other, scale=2.0):
        return self.inner(x) + other, other * scale


class Defaults(Pairs):
    def forward(self, x, other=None):
        return self.inner(x), x if other is None else other


class Any(Pairs):
    def forward(self, *parts):
        return self.inner(parts[0]), *parts[1:]


class One(Pairs):
    def forward(self, parts):
        x, other = parts
        return self.inner(x) + other


class Counting(TensorDataset):
    calls = 0

    def batch(self, indices):
        self.calls += 1
        return super().batch(indices)
