"""A task whose forwards update buffers: BatchNorm in several forms, and InstanceNorm."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bamboo_trainer.data import TensorDataset
from bamboo_trainer.task import Parts, Task

WIDTH = 4
SAMPLES = 24


class Derived(nn.BatchNorm1d):
    """A subclass of BatchNorm that updates its buffers as torch's class does."""

    def forward(self, given: Tensor) -> Tensor:
        return super().forward(given.float()).to(given.dtype)


class Enter(nn.Module):
    """A layer with norms of several kinds: cumulative average, no parameters, frozen, no running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, WIDTH, 3, padding=1)
        self.even = nn.BatchNorm1d(WIDTH, momentum=None)
        self.bare = nn.BatchNorm1d(WIDTH, affine=False, momentum=0.3)
        self.frozen = nn.BatchNorm1d(WIDTH).eval()
        self.own = nn.BatchNorm1d(WIDTH, track_running_stats=False)

    def forward(self, given: Tensor) -> Tensor:
        out = self.frozen(torch.relu(self.even(self.conv(given))))
        return self.bare(out) + self.own(out)


class Twice(nn.Module):
    """A layer that uses one norm twice; in between it has dropout, and another norm in activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = Derived(WIDTH), nn.BatchNorm1d(WIDTH, momentum=0.5)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, given: Tensor) -> Tensor:
        out = torch.dropout(self.norm(given), 0.1, self.training)
        out = checkpoint(lambda x: torch.tanh(self.inner(self.conv(x))), out, use_reentrant=False)
        return self.norm(given + out)


class Sometimes(nn.Module):
    """A layer whose BatchNorm only some microbatches reach."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)
        self.late = nn.BatchNorm1d(WIDTH)

    def forward(self, given: Tensor) -> Tensor:
        out = self.norm(given)
        return self.late(out) if given.detach().mean() > 0 else out * 0.5


class Leave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, given: Tensor) -> Tensor:
        return self.out(given.mean(2))


def build(config: Mapping[str, Any]) -> Task:
    """Return a task of layers with running statistics. config: `checkpointed`, the numbers of checkpointed layers."""
    x = torch.linspace(-3, 9, SAMPLES * 6).sin().reshape(SAMPLES, 1, 6) * torch.linspace(-1, 2, SAMPLES)[:, None, None]

    def loss(outputs: Parts, targets: Parts) -> Tensor:
        return (outputs[0] - targets[0]).square().mean()

    return Task(
        layers=[Enter, Twice, Sometimes, Leave],
        loss=loss,
        dataset=TensorDataset((x,), (x.mean(2).cos(),)),
        optimizer=lambda named: torch.optim.SGD(named, momentum=0.9),
        learning_rate=lambda step: 0.05,
        checkpointed=config.get("checkpointed", ()),
    )
