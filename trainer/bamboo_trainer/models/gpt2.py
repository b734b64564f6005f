"""GPT-2 in its four published sizes and a tiny one: `bamboo_trainer.models.gpt2:build`. Head and embedding are tied."""

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer.models.sequences import check_sizes, language_model, read_settings
from bamboo_trainer.task import Task, TrainingFacts

_COMMON: Final = {"vocabulary": 50257, "positions": 1024, "dropout": 0.1}
SIZES: Final[dict[str, dict[str, Any]]] = {
    "small": {**_COMMON, "width": 768, "heads": 12, "blocks": 12},
    "medium": {**_COMMON, "width": 1024, "heads": 16, "blocks": 24},
    "large": {**_COMMON, "width": 1280, "heads": 20, "blocks": 36},
    "xl": {**_COMMON, "width": 1600, "heads": 25, "blocks": 48},
    "tiny": {"vocabulary": 97, "positions": 16, "dropout": 0.1, "width": 16, "heads": 2, "blocks": 3},
}


class Gpt2Embedding(nn.Module):
    """The token and learned position embeddings: int64 [batch, time] -> [batch, time, width]."""

    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(c["vocabulary"], c["width"]), nn.Embedding(c["positions"], c["width"])
        self.dropout = nn.Dropout(c["dropout"])
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        out: Tensor = self.dropout(self.token(tokens) + self.position(positions))
        return out


class Gpt2Block(nn.Module):
    """A pre-norm transformer block: causal attention and a GELU MLP. Inputs and outputs: [batch, time, width]."""

    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        width = c["width"]
        self.heads, self.rate = c["heads"], c["dropout"]
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(c["dropout"])
        for linear in (self.qkv, self.projection, self.up, self.down):
            residual = linear in (self.projection, self.down)
            nn.init.normal_(linear.weight, std=0.02 / (math.sqrt(2 * c["blocks"]) if residual else 1))
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        rate = self.rate if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        x = x + self.dropout(self.projection(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh")))
        return out


class Gpt2Head(nn.Module):
    """The last norm and the output matrix: [batch, time, width] -> logits [batch, time, vocabulary]."""

    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(c["width"]), nn.Linear(c["width"], c["vocabulary"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(x))
        return logits


def build(config: Mapping[str, Any], training: TrainingFacts | None = None) -> Task:
    """Build a task that trains GPT-2. config: task.config. Raises ValueError, also for invalid data; StorageError."""
    c = read_settings(config, SIZES, "small")
    check_sizes(c)
    return language_model((Gpt2Embedding, Gpt2Block, Gpt2Head), c, training)
