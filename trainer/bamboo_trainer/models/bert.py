"""BERT as a masked language model, of size large (the default), base or tiny: `bamboo_trainer.models.bert:build`.

The output matrix is tied to the token embedding. Sentence pairs and next sentence prediction are left out.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer.models.sequences import check_sizes, check_tokens, language_model, read_settings
from bamboo_trainer.task import Parts, Task, TrainingFacts

_COMMON: Final = {"vocabulary": 30522, "positions": 512, "dropout": 0.1, "maskToken": 103}
SIZES: Final[dict[str, dict[str, Any]]] = {
    "large": {**_COMMON, "width": 1024, "heads": 16, "blocks": 24},
    "base": {**_COMMON, "width": 768, "heads": 12, "blocks": 12},
    "tiny": {"vocabulary": 97, "positions": 16, "dropout": 0.1, "maskToken": 3, "width": 16, "heads": 2, "blocks": 3},
}
EPSILON: Final = 1e-12


class BertEmbedding(nn.Module):
    """The token, position and segment embeddings: (tokens int64 [batch, time], mask [batch, time]) ->
    ([batch, time, width], mask as booleans). All tokens are in segment 0; without a mask all count.
    """

    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(c["vocabulary"], c["width"]), nn.Embedding(c["positions"], c["width"])
        self.kind = nn.Embedding(2, c["width"])
        self.norm, self.dropout = nn.LayerNorm(c["width"], EPSILON), nn.Dropout(c["dropout"])
        _small_values(self)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Parts:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        summed = self.token(tokens) + self.position(positions) + self.kind(torch.zeros_like(tokens))
        return self.dropout(self.norm(summed)), torch.ones_like(tokens).bool() if mask is None else mask.bool()


class BertBlock(nn.Module):
    """A post-norm transformer block: (x [batch, time, width], mask [batch, time]) -> (x, mask) of the same shapes."""

    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        width = c["width"]
        self.heads, self.rate = c["heads"], c["dropout"]
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width, EPSILON), nn.LayerNorm(width, EPSILON)
        self.dropout = nn.Dropout(c["dropout"])
        _small_values(self)

    def forward(self, x: Tensor, mask: Tensor) -> Parts:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        rate = self.rate if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :], dropout_p=rate)
        x = self.attention_norm(x + self.dropout(self.projection(mixed.transpose(1, 2).flatten(2))))
        return self.mlp_norm(x + self.dropout(self.down(F.gelu(self.up(x))))), mask


class BertHead(nn.Module):
    """The masked language modeling head: (x, mask) -> logits [batch, time, vocabulary]."""

    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        self.transform, self.norm = nn.Linear(c["width"], c["width"]), nn.LayerNorm(c["width"], EPSILON)
        self.out = nn.Linear(c["width"], c["vocabulary"])
        _small_values(self)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(F.gelu(self.transform(x))))
        return logits


def build(config: Mapping[str, Any], training: TrainingFacts | None = None) -> Task:
    """Build a task that trains BERT. config: task.config. Raises ValueError, also for invalid data; StorageError."""
    c = read_settings(config, SIZES, "large")
    check_sizes(c)
    check_tokens(torch.tensor(c["maskToken"]), c["vocabulary"], "maskToken")
    return language_model(
        (BertEmbedding, BertBlock, BertHead), c, training, objective="masked", mask_token=c["maskToken"]
    )


def _small_values(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)
