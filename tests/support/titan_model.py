"""A small Llama in the form of torchtitan's models, for the migration that docs/coming-from.md shows."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, LENGTH = 64, 16


class Block(nn.Module):
    """A transformer block, [samples, LENGTH, dim] to the same shape, with a complex rotary table of its own."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, half = heads, dim // heads // 2
        angles = torch.outer(torch.arange(LENGTH), 10_000 ** (-torch.arange(half) / half))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w3 = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.w2 = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (w(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(x)
        out: Tensor = x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))
        return out

    def _turned(self, heads: Tensor) -> Tensor:
        pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.get_buffer("freqs_cis")).flatten(-2)


class Transformer(nn.Module):
    """A language model, token ids [samples, LENGTH] to logits [samples, LENGTH, WORDS]."""

    def __init__(self, dim: int = 16, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, dim)
        self.layers = nn.ModuleDict({str(number): Block(dim, heads) for number in range(layers)})
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        out: Tensor = self.output(self.norm(h))
        return out
