"""A small byte-level GPT, trained by default on Python's own source code: `bamboo_trainer.models.gpt:build`."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer.data import TextDataset, text_bytes
from bamboo_trainer.data.config_keys import arguments, camel
from bamboo_trainer.models.sequences import decaying
from bamboo_trainer.task import Parts, Task

VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig:
    d_model: int = 128
    heads: int = 4
    blocks: int = 4
    context: int = 128
    dropout: float = 0.0
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    steps: int | None = None  # where the cosine ends, at a tenth of the rate; None: constant after the warm-up
    tie_embeddings: bool = False
    checkpoint: bool = False  # the blocks keep only their inputs, and are computed again in the backward
    text: str = "stdlib"  # or a file's path

    def __post_init__(self) -> None:
        for key in ("d_model", "heads", "blocks", "context"):
            _require(getattr(self, key) >= 1, key, "at least 1", getattr(self, key))
        _require(self.d_model % self.heads == 0, "d_model", f"a multiple of heads = {self.heads}", self.d_model)
        _require(0 <= self.dropout < 1, "dropout", "in [0, 1)", self.dropout)
        _require(self.learning_rate > 0, "learning_rate", "positive", self.learning_rate)
        _require(self.warmup_steps >= 0, "warmup_steps", "at least 0", self.warmup_steps)
        _require(self.weight_decay >= 0, "weight_decay", "at least 0", self.weight_decay)
        if self.steps is not None:
            _require(self.steps >= 1, "steps", "at least 1", self.steps)


class GptEmbedding(nn.Module):
    """The token and learned position embeddings: int64 [batch, time] -> [batch, time, d_model]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, config.d_model)
        self.position = nn.Embedding(config.context, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.dropout(self.token(tokens) + self.position(positions))
        return embedded


class GptBlock(nn.Module):
    """A pre-norm transformer block: causal attention and a GELU MLP. Inputs and outputs: [batch, time, d_model]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        width = config.d_model
        self.heads, self.rate = config.heads, config.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)
        for linear in (self.qkv, self.projection, self.up, self.down):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        for into_residual in (self.projection, self.down):
            nn.init.normal_(into_residual.weight, std=0.02 / math.sqrt(2 * config.blocks))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        rate = self.rate if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        x = x + self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, time, width)))
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))
        return out


class GptHead(nn.Module):
    """The last norm and the output matrix: [batch, time, d_model] -> logits [batch, time, 256]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, VOCABULARY, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(config: Mapping[str, Any]) -> Task:
    """Build a task that trains this library's GPT. config: task.config. Raises ValueError, naming the invalid key."""
    parsed = GptConfig(**arguments(GptConfig, config))
    blocks: list[Callable[[], nn.Module]] = [partial(GptBlock, parsed)] * parsed.blocks
    return Task(
        layers=(partial(GptEmbedding, parsed), *blocks, partial(GptHead, parsed)),
        loss=_loss,
        dataset=TextDataset(text_bytes(parsed.text, "text"), parsed.context),
        tokens_per_sample=parsed.context,
        optimizer=partial(_optimizer, parsed),
        learning_rate=partial(learning_rate, parsed),
        tied=(("0.token.weight", f"{parsed.blocks + 1}.head.weight"),) if parsed.tie_embeddings else (),
        checkpointed=range(1, parsed.blocks + 1) if parsed.checkpoint else (),
    )


def learning_rate(config: GptConfig, step: int) -> float:
    """Return a step's learning rate: linear warm-up to `config.learning_rate`, then cosine decay to a tenth of it at
    `config.steps` (at least one step after the warm-up), or a constant rate if `config.steps` is None. step: from 0.
    """
    rate = config.learning_rate
    if step < config.warmup_steps:
        return rate * (step + 1) / config.warmup_steps
    if config.steps is None:
        return rate
    horizon = max(1, config.steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / horizon)
    return rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def _require(holds: bool, field: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{camel(field)} must be {expected}, got {got}")


def _loss(outputs: Parts, targets: Parts) -> Tensor:
    return F.cross_entropy(outputs[0].flatten(0, 1), targets[0].flatten())


def _optimizer(config: GptConfig, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices, and none for vectors."""
    groups = decaying(named, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))
