"""GNMT-16 as published, in one file: LSTMs with attention, on made-up sentences (docs/models.md).

    bamboo run examples/translation.yaml --preempt at:10:2 --verify

The encoder's layers pass on their output, the mask of the source's words, and `before`: the target, shifted right by
one. The decoder's layers pass on their output (written) and the attention's context (found).
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer.task import Parts, Task, Weighted

FILL = 0  # padding, which does not count
DROPOUT = 0.2
SIZES = {"16": (32000, 1024, 8, 50), "tiny": (31, 8, 3, 7)}  # words, width, layers that read, longest sentence


class Pairs:
    """A dataset: sample i is a sentence from a generator seeded with i; its translation is backwards, with other words.

    Inputs: the source, and the target shifted right by one, with 1 in front. Targets: the target. All are int64
    [samples, length], padded with 0.
    """

    def __init__(self, samples: int, length: int, words: int) -> None:
        self.samples, self.length, self.words = samples, length, words

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        source = torch.zeros(len(indices), self.length, dtype=torch.int64)
        target = torch.zeros_like(source)
        for row, index in enumerate(indices):
            generator = torch.Generator().manual_seed(index)
            length = int(torch.randint(self.length // 2 + 1, self.length + 1, (), generator=generator))
            source[row, :length] = torch.randint(2, self.words, (length,), generator=generator)
            target[row, :length] = (source[row, :length].flip(0) + 5) % (self.words - 2) + 2
        before = torch.cat([torch.ones_like(target[:, :1]), target[:, :-1]], dim=1)
        return (source, before), (target,)


class Source(nn.Module):
    """The embedding: (source int64 [batch, source], before) -> (embedded [batch, source, width], mask, before)."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.token, self.dropout = nn.Embedding(words, width), nn.Dropout(DROPOUT)
        first_values(self.token)

    def forward(self, source: Tensor, before: Tensor) -> Parts:
        return self.dropout(self.token(source)), source != FILL, before


class Reader(nn.Module):
    """An encoder LSTM: (x [batch, source, width], mask, before) -> the same. The first one returns 2 * width."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2 * width if number == 1 else width, width, batch_first=True, bidirectional=number == 0)
        self.dropout, self.residual = nn.Dropout(DROPOUT), number >= 2
        first_values(self.lstm)

    def forward(self, x: Tensor, mask: Tensor, before: Tensor) -> Parts:
        out = self.dropout(self.lstm(x)[0])
        return out + x if self.residual else out, mask, before


class AttentiveWriter(nn.Module):
    """The first decoder layer: its output queries normalized additive (Bahdanau) attention over the encoder's output.

    (read [batch, source, width], mask, before [batch, target]) -> (written, found), both [batch, target, width].
    """

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.token, self.dropout = nn.Embedding(words, width), nn.Dropout(DROPOUT)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.direction, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.zeros(width))
        self.scale = nn.Parameter(torch.full((1,), width**-0.5))
        nn.init.uniform_(self.direction, -0.1, 0.1)
        first_values(self.token)
        first_values(self.lstm)

    def forward(self, read: Tensor, mask: Tensor, before: Tensor) -> Parts:
        written = self.dropout(self.lstm(self.dropout(self.token(before)))[0])
        summed = torch.tanh(self.query(written)[:, :, None] + self.key(read)[:, None] + self.bias)
        scores = summed @ (self.scale * self.direction / self.direction.norm())
        weights = scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min).softmax(dim=-1)
        return written, weights @ read


class Writer(nn.Module):
    """A further decoder layer, an LSTM: (written, found), both [batch, target, width] -> the same."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2 * width, width, batch_first=True)
        self.dropout, self.residual = nn.Dropout(DROPOUT), number >= 2
        first_values(self.lstm)

    def forward(self, written: Tensor, found: Tensor) -> Parts:
        out = self.dropout(self.lstm(torch.cat([written, found], dim=-1))[0])
        return out + written if self.residual else out, found


class Head(nn.Module):
    """The output layer: (written, found) -> logits [batch, target, words]."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, words)
        nn.init.uniform_(self.out.weight, -0.1, 0.1)

    def forward(self, written: Tensor, found: Tensor) -> Tensor:
        logits: Tensor = self.out(written)
        return logits


def first_values(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.1, 0.1)


def build(config: Mapping[str, Any]) -> Task:
    words, width, layers, length = SIZES[config["size"]]
    rate = float(config.get("learningRate", 1e-3))
    return Task(
        layers=(
            partial(Source, words, width),
            *[partial(Reader, width, number) for number in range(layers)],
            partial(AttentiveWriter, words, width),
            *[partial(Writer, width, number) for number in range(1, layers)],
            partial(Head, words, width),
        ),
        loss=loss,
        dataset=Pairs(512, length, words),
        optimizer=partial(optimizer, rate),
        learning_rate=lambda step: rate,
    )


def loss(outputs: Parts, targets: Parts) -> Weighted:
    """Return the loss summed over all words but padding, and their number: a step's loss is the mean over its words."""
    logits, words = outputs[0].flatten(0, 1), targets[0].flatten()
    summed = F.cross_entropy(logits, words, ignore_index=FILL, label_smoothing=0.1, reduction="sum")
    return Weighted(summed, (words != FILL).sum())


def optimizer(rate: float, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=rate, weight_decay=0.0)
