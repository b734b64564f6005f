"""States of stages of several splits."""

import torch
from torch import nn

from bamboo_trainer.checkpoint.layer_file import encode
from counting_optimizers import Averaging
from stage_kit import small_task

SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


OPTIMIZERS = {
    "plain SGD": lambda named: SGD(named, lr=0.1),
    "momentum": lambda named: SGD(named, lr=0.1, momentum=0.9),
    "dampening": lambda named: SGD(named, lr=0.1, momentum=0.9, dampening=0.5),
    "AdamW": lambda named: ADAMW(named, amsgrad=True),
    "foreach": lambda named: ADAMW(named, foreach=True),
    "fused": lambda named: ADAMW(named, fused=True),
    "Adagrad": lambda named: torch.optim.Adagrad(named, initial_accumulator_value=0.5),
    "NAdam": lambda named: torch.optim.NAdam(named),
    "Rprop": lambda named: torch.optim.Rprop(named),
    "numbers in groups": lambda named: Averaging(p for _, p in named),
}


class Block(nn.Module):
    """Trained, frozen, and buffers: one that belongs to the state dict, one that does not, one of no elements."""

    def __init__(self, frozen=True):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.inner.bias.requires_grad_(not frozen)
        self.register_buffer("shift", torch.linspace(0, 1, 3))
        self.register_buffer("hidden", torch.tensor(2), persistent=False)
        self.register_buffer("nothing", torch.empty(0, 4))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.inner(x + self.shift) * self.temperature / self.hidden


class Tied(nn.Module):
    """Uses its weight under two names of its own, which another layer has too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3) + 0.1)
        self.again = self.weight

    def forward(self, x):
        return x @ self.again.t() + x @ self.weight


LAYERS = (lambda: nn.Linear(2, 3), Block, Tied, nn.Tanh, Block, Tied, lambda: nn.Linear(3, 2))


SPLITS = (
    [(0, 7)],
    [(0, 3), (3, 7)],
    [(0, 1), (1, 5), (5, 7)],
    [(0, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)],
)


def task_of(optimizer="AdamW", tied=False):
    names = (("2.weight", "5.again"),) if tied else ()
    return small_task(layers=LAYERS, optimizer=OPTIMIZERS[optimizer], tied=names)


def files_of(stages):
    """The files of layers as workers write them: each stage its own."""
    return {layer: b"".join(encode(state)) for stage in stages for layer, state in stage.values.layer_states().items()}
