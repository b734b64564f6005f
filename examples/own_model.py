"""Your own model in one file: a small Transformer learns to sort digits (docs/models.md).

    bamboo run examples/own-model.yaml

The manifest names the function `build` as its task.entrypoint: own_model:build.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer.task import Parts, Task

DIGITS = 10


class Digits:
    """A dataset: sample i is random digits from a generator seeded with i; its target is the same digits, sorted."""

    def __init__(self, samples: int, length: int) -> None:
        self.samples, self.length = samples, length

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        drawn = [torch.randint(DIGITS, (self.length,), generator=torch.Generator().manual_seed(i)) for i in indices]
        digits = torch.stack(drawn)
        return (digits,), (digits.sort(dim=1).values,)


class Embedding(nn.Module):
    """Token and position embeddings: int64 [batch, length] -> [batch, length, width]."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(DIGITS, width)
        nn.init.normal_(self.token.weight, std=0.1)
        self.position = nn.Parameter(0.1 * torch.randn(length, width))

    def forward(self, digits: Tensor) -> Tensor:
        embedded: Tensor = self.token(digits) + self.position
        return embedded


class Head(nn.Module):
    """The output layer: [batch, length, width] -> logits [batch, length, 10]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, DIGITS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(x))
        return logits


def build(config: Mapping[str, Any]) -> Task:
    """Return the task for a manifest's config. Raises ValueError, with a sentence for the user, if it is invalid."""
    known = {"width": 64, "blocks": 3, "length": 12, "samples": 50_000, "learningRate": 3e-3, "dropout": 0.1}
    if unknown := sorted(config.keys() - known.keys()):
        raise ValueError(f"unknown key {unknown[0]!r}, expected some of {', '.join(known)}")
    chosen = {**known, **config}
    width, length, blocks = int(chosen["width"]), int(chosen["length"]), int(chosen["blocks"])
    if width < 4 or width % 4:
        raise ValueError(f"width must be a multiple of 4, the number of heads, got {width}")
    block = partial(
        nn.TransformerEncoderLayer, width, nhead=4, dim_feedforward=4 * width, dropout=float(chosen["dropout"]),
        activation="gelu", batch_first=True, norm_first=True,
    )  # fmt: skip
    return Task(
        # Factories, not modules: a worker calls only those of the layers that it holds.
        layers=(partial(Embedding, length, width), *[block] * blocks, partial(Head, width)),
        loss=loss,
        dataset=Digits(int(chosen["samples"]), length),
        optimizer=partial(optimizer, float(chosen["learningRate"])),
        learning_rate=partial(learning_rate, float(chosen["learningRate"])),
        # The head's matrix is the embedding's, wherever the two layers live.
        tied=(("0.token.weight", f"{blocks + 1}.out.weight"),),
        # The blocks keep only their inputs for the backward, and are run again in it.
        checkpointed=range(1, blocks + 1),
    )


def loss(outputs: Parts, targets: Parts) -> Tensor:
    """Return the mean cross-entropy over the microbatch, as Bamboo expects it."""
    return F.cross_entropy(outputs[0].flatten(0, 1), targets[0].flatten())


def optimizer(rate: float, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return AdamW for one stage's parameters, with weight decay for matrices only. Leave out an empty group."""
    pairs = list(named)
    groups = [
        {"params": [p for _, p in pairs if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in pairs if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=rate)


def learning_rate(rate: float, step: int) -> float:
    """Return a step's learning rate: a warm-up of 20 steps, then `rate`. Pure, because every worker calls it."""
    return rate * min(1.0, (step + 1) / 20)
