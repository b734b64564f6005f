"""Tasks whose layers and optimizers have all kinds of state, and the checkpoint files of their layers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from bamboo_trainer.checkpoint.layer_file import encode
from stage_kit import small_task


class Averaging(torch.optim.Optimizer):
    """An optimizer that steps along the mean of all k gradients so far, and keeps values in its groups: k, a sum of
    weights, and a flag.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "started": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["started"] = True
            group["weight_sum"] = group.get("weight_sum", 0.0) + group["lr"] / group["k"]
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 1 / group["k"])
                    p.add_(mean, alpha=-group["lr"] / (1 + group["weight_sum"]))


class OfWhole(torch.optim.SGD):
    """An optimizer whose group has a number that depends on the split: each step adds the size of its parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["size"] = group.get("size", 0) + sum(p.numel() for p in group["params"])
        super().step()


class Listing(torch.optim.SGD):
    """An optimizer that keeps a list in its groups."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["rates"] = [*group.get("rates", ()), group["lr"]]
        super().step()


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
    """A layer with trained and frozen parameters, and with buffers: persistent, not persistent, and empty."""

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
    """A layer that uses its weight under two names, and shares it with another layer if `task_of` ties them."""

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
    """Return the content of each layer's checkpoint file, as workers write it, by layer."""
    return {layer: b"".join(encode(state)) for stage in stages for layer, state in stage.values.layer_states().items()}
