"""Optimizers that keep numbers in their parameter groups which change from step to step, as some published ones do."""

from collections.abc import Iterable
from typing import Any

import torch


class Averaging(torch.optim.Optimizer):
    """Steps by lr / k with a growing momentum; k, the sum of weights and whether it has begun are in the groups."""

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
    """Keeps a number that depends on all parameters of the group, and so on the split."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["size"] = group.get("size", 0) + sum(p.numel() for p in group["params"])
        super().step()


class Listing(torch.optim.SGD):
    """Keeps what is no number."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["rates"] = [*group.get("rates", ()), group["lr"]]
        super().step()
