"""GNMT-16 for translation, an LSTM encoder and decoder of 8 layers each: `bamboo_trainer.models.gnmt:build`.

The layers pass on tuples. Encoder: its output so far, the mask of the source's words, and `before`, the target's words,
each one place later. Decoder: its output so far (written), and the attention's context (found).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer.data import pure_seed
from bamboo_trainer.models import settings
from bamboo_trainer.task import Dataset, Parts, Task, TrainingFacts, Weighted

FILL: Final = 0  # padding, which does not count
SIZES: Final[dict[str, dict[str, Any]]] = {
    "16": {"vocabulary": 32000, "width": 1024, "layers": 8, "dropout": 0.2, "length": 50},
    "tiny": {"vocabulary": 31, "width": 8, "layers": 3, "dropout": 0.2, "length": 7},
}
SMOOTHING: Final = 0.1


class SourceWords(nn.Module):
    """The source embedding: (source int64 [batch, source], before int64 [batch, target]) -> (embedded [batch, source,
    width], mask bool [batch, source], before).
    """

    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        self.token, self.dropout = nn.Embedding(c["vocabulary"], c["width"]), nn.Dropout(c["dropout"])
        nn.init.uniform_(self.token.weight, -0.1, 0.1)

    def forward(self, source: Tensor, before: Tensor) -> Parts:
        return self.dropout(self.token(source)), source != FILL, before


class Reader(nn.Module):
    """An encoder layer, an LSTM: (x [batch, source, width], mask, before) -> the same. The first one is bidirectional,
    with an output of twice the width; from the third on there is a residual connection.
    """

    def __init__(self, c: Mapping[str, Any], number: int) -> None:
        super().__init__()
        width = c["width"]
        self.lstm = nn.LSTM(2 * width if number == 1 else width, width, batch_first=True, bidirectional=number == 0)
        self.dropout, self.residual = nn.Dropout(c["dropout"]), number >= 2
        _first_values(self.lstm)

    def forward(self, x: Tensor, mask: Tensor, before: Tensor) -> Parts:
        out = self.dropout(self.lstm(x)[0])
        return out + x if self.residual else out, mask, before


class AttentiveWriter(nn.Module):
    """The first decoder layer: an LSTM whose output queries normalized additive (Bahdanau) attention over the encoder's
    output.

    (read [batch, source, width], mask [batch, source], before int64 [batch, target]) -> (written, found), both [batch,
    target, width]; found: the attention's context.
    """

    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        width = c["width"]
        self.token, self.dropout = nn.Embedding(c["vocabulary"], width), nn.Dropout(c["dropout"])
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.direction, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.zeros(width))
        self.scale = nn.Parameter(torch.full((1,), width**-0.5))
        nn.init.uniform_(self.token.weight, -0.1, 0.1)
        nn.init.uniform_(self.direction, -0.1, 0.1)
        _first_values(self.lstm)

    def forward(self, read: Tensor, mask: Tensor, before: Tensor) -> Parts:
        written = self.dropout(self.lstm(self.dropout(self.token(before)))[0])
        summed = torch.tanh(self.query(written)[:, :, None] + self.key(read)[:, None] + self.bias)
        scores = summed @ (self.scale * self.direction / self.direction.norm())
        weights = scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min).softmax(dim=-1)
        return written, weights @ read


class Writer(nn.Module):
    """A further decoder layer, an LSTM: (written, found), both [batch, target, width] -> the same. From the third
    decoder layer on there is a residual connection.
    """

    def __init__(self, c: Mapping[str, Any], number: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2 * c["width"], c["width"], batch_first=True)
        self.dropout, self.residual = nn.Dropout(c["dropout"]), number >= 2
        _first_values(self.lstm)

    def forward(self, written: Tensor, found: Tensor) -> Parts:
        out = self.dropout(self.lstm(torch.cat([written, found], dim=-1))[0])
        return out + written if self.residual else out, found


class GnmtHead(nn.Module):
    """The output layer: (written, found) -> logits [batch, target, vocabulary]."""

    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        self.out = nn.Linear(c["width"], c["vocabulary"])
        nn.init.uniform_(self.out.weight, -0.1, 0.1)

    def forward(self, written: Tensor, found: Tensor) -> Tensor:
        logits: Tensor = self.out(written)
        return logits


def build(config: Mapping[str, Any], training: TrainingFacts | None = None) -> Task:
    """Build a task that trains GNMT. config: task.config. Raises ValueError, naming the invalid key.

    Data: inputs are the source and, for each word of the target, the word before it; targets are the words of the
    target. All are int64 [samples, length], padded with 0.
    """
    c = settings.read(config, SIZES, "16")
    settings.whole_numbers(c, "vocabulary", "width", "layers", "length")
    readers = (partial(Reader, c, number) for number in range(c["layers"]))
    writers = (partial(Writer, c, number) for number in range(1, c["layers"]))

    def made_up(samples: int, first: int) -> Dataset:
        return MadeUpPairs(samples, c["length"], c["vocabulary"], first)

    data = settings.data_of(c, made_up, accuracy)
    return Task(
        layers=(partial(SourceWords, c), *readers, partial(AttentiveWriter, c), *writers, partial(GnmtHead, c)),
        loss=loss,
        optimizer=partial(settings.adamw, c),
        learning_rate=settings.rate(c, training, data["dataset"]),
        **data,
    )


def loss(outputs: Parts, targets: Parts) -> Weighted:
    """Return the label-smoothed cross entropy, summed over the words that are not padding, with their number, so that a
    step's loss is the mean over its whole batch.
    """
    logits, words = outputs[0].flatten(0, 1), targets[0].flatten()
    summed = F.cross_entropy(logits, words, ignore_index=FILL, label_smoothing=SMOOTHING, reduction="sum")
    return Weighted(summed, (words != FILL).sum())


def accuracy(outputs: Parts, targets: Parts) -> tuple[Tensor, Tensor]:
    """Return the number of words whose logit is the highest, and the number of words; padding does not count."""
    counts = targets[0] != FILL
    return ((outputs[0].argmax(-1) == targets[0]) & counts).sum(), counts.sum()


def _first_values(lstm: nn.LSTM) -> None:
    for parameter in lstm.parameters():
        nn.init.uniform_(parameter, -0.1, 0.1)


@dataclass(frozen=True, slots=True)
class MadeUpPairs:
    """Made-up pairs of sentences for translation: a target is its source backwards, with other words.

    Inputs: the source, and the target one place later, begun by 1. Targets: the target. All are int64 [samples,
    length], padded with 0.
    """

    samples: int
    length: int
    words: int
    first: int = 0  # the seed of sample 0; sample i has first + i

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        source = torch.zeros(len(indices), self.length, dtype=torch.int64)
        target = torch.zeros_like(source)
        for row, index in enumerate(indices):
            generator = torch.Generator().manual_seed(pure_seed("pair", self.first + index))
            length = int(torch.randint(self.length // 2 + 1, self.length + 1, (), generator=generator))
            source[row, :length] = torch.randint(2, self.words, (length,), generator=generator)
            target[row, :length] = (source[row, :length].flip(0) - 2 + 7) % (self.words - 2) + 2
        before = torch.cat([torch.ones_like(target[:, :1]), target[:, :-1]], dim=1)
        return (source, before), (target,)
