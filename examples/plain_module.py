"""A plain torch module as a job: `from_module` splits it into layers at its blocks. The module needs no change."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bamboo_trainer.data import TensorDataset
from bamboo_trainer.from_module import from_module
from bamboo_trainer.task import Parts, Task


class Block(nn.Module):
    """A Transformer block: [batch, length, width], mask [batch, length] (True: used) -> {"hidden": same shape}."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(inplace=True), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor, *, mask: Tensor) -> dict[str, Tensor]:
        normed = self.norm(hidden)
        hidden = hidden + self.attention(normed, normed, normed, key_padding_mask=~mask, need_weights=False)[0]
        return {"hidden": hidden + self.mlp(hidden)}


class Counter(nn.Module):
    """A model that counts how often a sequence's first digit occurs in it: logits [batch, length + 1] of the counts."""

    def __init__(self, width: int, blocks: int, length: int) -> None:
        super().__init__()
        self.digits, self.positions = nn.Embedding(10, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, length + 1)

    def forward(self, digits: Tensor, mask: Tensor) -> dict[str, Tensor]:
        hidden = self.digits(digits) + self.positions
        for block in self.blocks:
            hidden = block(hidden, mask=mask)["hidden"]
        return {"counts": self.head(hidden[:, 0])}


def loss(outputs: dict[str, Tensor], targets: Parts) -> Tensor:
    return nn.functional.cross_entropy(outputs["counts"], targets[0])


def optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3)


def sequences(count: int, length: int) -> TensorDataset:
    """Return a dataset of digits, a mask that keeps the first few, and the number of kept digits equal to the first."""
    generator = torch.Generator().manual_seed(0)
    digits = torch.randint(0, 10, (count, length), generator=generator)
    mask = torch.arange(length) < torch.randint(1, length + 1, (count, 1), generator=generator)
    return TensorDataset((digits, mask), (((digits == digits[:, :1]) & mask).sum(dim=1),))


def build(config: Mapping[str, Any]) -> Task:
    length = 12
    return from_module(
        lambda: Counter(int(config["width"]), int(config["blocks"]), length),
        blocks="blocks",
        inputs=("digits", "mask"),
        loss=loss,
        dataset=sequences(10_000, length),
        optimizer=optimizer,
        learning_rate=1e-3,
    )
