"""A task of which no step uses all parameters: idle experts, skipped layers, an output ignored, a weight tied."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bamboo_trainer.data import TensorDataset
from bamboo_trainer.task import Parts, Task

WIDTH = 4
KINDS = (0, 0, 1, 0, 2, 0, 0, 3, 0, 1, 0, 0)  # of the samples; most experts have nothing to do in most microbatches
Named = Iterable[tuple[str, nn.Parameter]]
OPTIMIZERS: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "AdamW": lambda named: torch.optim.AdamW(named, weight_decay=0.3),
    "foreach": lambda named: torch.optim.AdamW(named, weight_decay=0.3, foreach=True),
    "fused": lambda named: torch.optim.AdamW(named, weight_decay=0.3, fused=True),
    "momentum": lambda named: torch.optim.SGD(named, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda named: torch.optim.Adagrad(named, weight_decay=0.1),
    "NAdam": lambda named: torch.optim.NAdam(named, weight_decay=0.1),  # remembers nothing before the first use
}


class Enter(nn.Module):
    """Gives an estimate along with its output, which the next layer may ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.estimate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.never = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, given: Parts) -> Parts:
        x, kinds = given
        h = torch.tanh(self.main(x)) * self.frozen
        if (kinds == 1).any():
            h = h + x @ self.tied
        return h, self.estimate(x), kinds


class Estimated(nn.Module):
    """Takes the estimate into account for some samples only, and nothing of what came before for others."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, given: Parts) -> Parts:
        h, estimate, kinds = given
        if (kinds == 2).any():
            h = h + self.weigh(estimate)
        return (h.detach() if (kinds == 3).any() else h), kinds


class Experts(nn.Module):
    """Each sample goes to the expert of its kind."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, given: Parts) -> Parts:
        h, kinds = given
        out = h
        for kind, expert in enumerate(self.experts):
            if (chosen := (kinds == kind).nonzero()[:, 0]).numel():
                out = out.index_add(0, chosen, torch.tanh(expert(h[chosen])).to(h.dtype))
        return out, kinds


class Leave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(WIDTH, 1)
        self.tied = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, given: Parts) -> Tensor:
        h, kinds = given
        return self.main(h @ self.tied if (kinds == 2).any() else h)


def build(config: Mapping[str, Any]) -> Task:
    """config: optimizer, a key of OPTIMIZERS."""
    x = torch.linspace(-1, 1, len(KINDS) * WIDTH).reshape(len(KINDS), WIDTH).sin()
    return Task(
        layers=[Enter, Estimated, Experts, nn.Identity, Experts, Leave],
        loss=lambda outputs, targets: (outputs[0] - targets[0]).square().mean(),
        dataset=TensorDataset((x, torch.tensor(KINDS)), (x.sum(1, keepdim=True),)),
        optimizer=OPTIMIZERS[config.get("optimizer", "AdamW")],
        learning_rate=lambda step: 0.05,
        tied=(("0.tied", "5.tied"),),
        checkpointed=(2,),
    )
