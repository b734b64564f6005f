"""A decoder of the Llama family: `bamboo_trainer.models.llama:build`.

It has RMSNorm, rotary position embeddings (RoPE), grouped-query attention, and a SwiGLU MLP. For published weights use
`bamboo_trainer.models.huggingface`.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer.models.sequences import language_model, read_settings, whole_numbers
from bamboo_trainer.task import Task, TrainingFacts

SIZES: Final[dict[str, dict[str, Any]]] = {
    "2-7b": {
        "vocabulary": 32000,
        "positions": 4096,
        "width": 4096,
        "inner": 11008,
        "heads": 32,
        "keyHeads": 32,
        "blocks": 32,
        "theta": 1e4,
        "tied": False,
    },
    "3-8b": {
        "vocabulary": 128256,
        "positions": 8192,
        "width": 4096,
        "inner": 14336,
        "heads": 32,
        "keyHeads": 8,
        "blocks": 32,
        "theta": 5e5,
        "tied": False,
    },
    "3.2-1b": {
        "vocabulary": 128256,
        "positions": 8192,
        "width": 2048,
        "inner": 8192,
        "heads": 32,
        "keyHeads": 8,
        "blocks": 16,
        "theta": 5e5,
        "tied": True,
    },
    "tiny": {
        "vocabulary": 97,
        "positions": 16,
        "width": 16,
        "inner": 24,
        "heads": 4,
        "keyHeads": 2,
        "blocks": 3,
        "theta": 1e4,
        "tied": False,
    },
}
EPSILON: Final = 1e-5


class LlamaEmbedding(nn.Module):
    """The token embedding: int64 [batch, time] -> [batch, time, width]."""

    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        self.token = nn.Embedding(c["vocabulary"], c["width"])
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.token(tokens)
        return out


class LlamaBlock(nn.Module):
    """A pre-norm transformer block: causal attention and a gated MLP. Inputs and outputs: [batch, time, width]."""

    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        width, self.size, self.theta = c["width"], c["width"] // c["heads"], c["theta"]
        self.grouped = c["heads"] != c["keyHeads"]
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, EPSILON), nn.RMSNorm(width, EPSILON)
        self.query, self.projection = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, c["keyHeads"] * self.size, bias=False)
        self.value = nn.Linear(width, c["keyHeads"] * self.size, bias=False)
        self.gate, self.up = nn.Linear(width, c["inner"], bias=False), nn.Linear(width, c["inner"], bias=False)
        self.down = nn.Linear(c["inner"], width, bias=False)
        for linear in (self.query, self.key, self.value, self.projection, self.gate, self.up, self.down):
            nn.init.normal_(linear.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        query, key, value = (
            linear(normed).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        exponents = torch.arange(0, self.size, 2, device=x.device, dtype=torch.float32) / self.size
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.theta**-exponents
        mixed = F.scaled_dot_product_attention(
            rotated(query, angles), rotated(key, angles), value, is_causal=True, enable_gqa=self.grouped
        )
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out


class LlamaHead(nn.Module):
    """The last norm and the output matrix: [batch, time, width] -> logits [batch, time, vocabulary]."""

    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        self.norm, self.out = nn.RMSNorm(c["width"], EPSILON), nn.Linear(c["width"], c["vocabulary"], bias=False)
        nn.init.normal_(self.out.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(x))
        return logits


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary position embeddings (RoPE) to x [batch, heads, time, size]: rotate elements i and i + size / 2 by
    angles[time, i], in radians.
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def build(config: Mapping[str, Any], training: TrainingFacts | None = None) -> Task:
    """Build a task that trains Llama. config: task.config. Raises StorageError, or ValueError naming the key."""
    c = read_settings(config, SIZES, "3.2-1b")
    whole_numbers(c, "vocabulary", "positions", "width", "inner", "heads", "keyHeads", "blocks", "theta")
    if c["width"] % (2 * c["heads"]):
        raise ValueError(f"width must be a multiple of 2 heads = {2 * c['heads']}, got {c['width']}")
    if c["heads"] % c["keyHeads"]:
        raise ValueError(f"heads must be a multiple of keyHeads = {c['keyHeads']}, got {c['heads']}")
    return language_model((LlamaEmbedding, LlamaBlock, LlamaHead), c, training, tied=c["tied"], rotary=True)
