"""Data with labels, for the heads of language models: of a whole sequence, of each token, of the right choice."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bamboo_trainer.data import TensorDataset, dataset_from
from bamboo_trainer.data.prefetched import readers_of
from bamboo_trainer.models.parts import settings
from bamboo_trainer.models.parts.sequences import (
    IGNORED,
    INPUTS,
    check_tokens,
    check_trim,
    made_up_sizes,
    taken_trim,
    trimmed_width,
)
from bamboo_trainer.task import Dataset, Parts, Weighted

Head = Literal["sequence", "token", "choice"]
HEADS: Final[tuple[Head, ...]] = ("sequence", "token", "choice")
CHOICES: Final = 3  # of made-up data
MADE_UP: Final = {"length": 32, "samples": 512}


class Labelled:
    """Labelled samples.

    Inputs: int64 token ids, perhaps a mask of the tokens that count, and after it the kinds of tokens; their shape is
    [samples, length], or [samples, choices, length] for "choice". Targets: int64 [samples], or [samples, length] for
    "token"; -100 does not count. For "sequence" they may be floats: [samples] for one label, the value to predict, else
    [samples, labels], each true or false.

    words: size of the vocabulary. labels: their number. where: the config's key, for messages. trim, names: see
    `Sequences`.
    """

    def __init__(
        self,
        source: Dataset,
        head: Head,
        words: tuple[int, int],
        where: str = "data",
        *,
        trim: int = 0,
    ) -> None:
        self._trim = trim
        self._source, self._head, self._where = source, head, where
        self._words, self._labels = words
        given, targets = source.batch([0])
        dimensions = 3 if head == "choice" else 2
        if not 1 <= len(given) <= len(INPUTS) or len(targets) != 1 or any(t.dim() != dimensions for t in given):
            shape = "[samples, choices, length]" if head == "choice" else "[samples, length]"
            raise ValueError(
                f"{where}: expected tokens {shape}, perhaps a mask and the kinds of tokens, and one target, got inputs "
                f"{[list(t.shape) for t in given]} and {len(targets)} targets"
            )
        self._check(targets[0], given[0])
        self.names, self.masked = INPUTS[: len(given)], len(given) > 1
        check_trim(trim, self.masked, where)
        self.prefetched = readers_of(source)
        self.length = int(given[0].shape[-1])
        self.tokens_per_sample: int | None = None if self.masked else given[0][0].numel()

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        """Return samples. Raises ValueError for a token outside of the vocabulary, or an unknown label."""
        given, (target,) = self._source.batch(indices)
        ids = given[0].long()
        check_tokens(ids, self._words, self._where)
        self._check(target, ids)
        width = trimmed_width(given[1], self._trim) if self.masked else ids.shape[-1]
        target = target[:, :width].contiguous() if self._head == "token" else target
        return tuple(part.long()[..., :width].contiguous() for part in given), (target,)

    def _check(self, target: Tensor, ids: Tensor) -> None:
        if target.is_floating_point():
            if self._head != "sequence":
                raise ValueError(f"{self._where}: expected whole numbers as labels, got {target.dtype}")
            several = (len(ids), self._labels)
            if tuple(target.shape) not in ({(len(ids),), several} if self._labels == 1 else {several}):
                raise ValueError(f"{self._where}: expected {self._labels} values a sample, got {list(target.shape)}")
            return
        expected = ids.shape if self._head == "token" else ids.shape[:1]
        if target.shape != expected:
            raise ValueError(f"{self._where}: expected labels of shape {list(expected)}, got {list(target.shape)}")
        most = ids.shape[1] if self._head == "choice" else self._labels
        strange = target[(target != IGNORED) & ((target < 0) | (target >= most))]
        if len(strange):
            raise ValueError(f"{self._where}: expected labels below {most}, or {IGNORED}, got {int(strange[0])}")


def open_labelled(config: Mapping[str, Any], head: Head, words: int, labels: int, where: str = "data") -> Labelled:
    """Open the samples that a config describes. Raises ValueError.

    config: {"kind": "random", "length", "samples", "padding"} are made up, and the default; for the other kinds see
    `bamboo_trainer.data.dataset_from`.
    """
    given = dict(config)
    trim = taken_trim(given, where)
    made_up = {settings.MADE_UP: partial(_made_up, head, words, labels)}
    source = dataset_from({"kind": settings.MADE_UP, **given}, where, made_up)
    return Labelled(source, head, (words, labels), where, trim=trim)


def label_loss(outputs: Parts, targets: Parts) -> Weighted:
    """Return the loss as transformers computes it, summed, so that a step's loss is the mean over its whole batch.

    It is the cross entropy of labels that count; for floats the squared error of a single label, or the binary cross
    entropy of several.
    """
    (logits,), (labels,) = outputs, targets
    if not labels.is_floating_point():
        flat, wanted = logits.reshape(-1, logits.shape[-1]), labels.flatten()
        summed = F.cross_entropy(flat, wanted, ignore_index=IGNORED, reduction="sum")
        return Weighted(summed, (wanted != IGNORED).sum())
    wanted = labels.reshape(logits.shape)
    if logits.shape[-1] == 1:
        return Weighted(F.mse_loss(logits, wanted, reduction="sum"), torch.tensor(wanted.numel()))
    summed = F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum")
    return Weighted(summed, torch.tensor(wanted.numel()))


def label_accuracy(outputs: Parts, targets: Parts) -> tuple[Tensor, Tensor]:
    """Return the number of right answers, and of possible ones.

    These are labels that count and have the highest logit; of several true or false labels, the right ones; of a single
    value, the samples nearer than 0.5.
    """
    (logits,), (labels,) = outputs, targets
    if not labels.is_floating_point():
        counts = labels != IGNORED
        return ((logits.argmax(-1) == labels) & counts).sum(), counts.sum()
    wanted = labels.reshape(logits.shape)
    right = (logits - wanted).abs() < 0.5 if logits.shape[-1] == 1 else (logits > 0) == (wanted > 0.5)
    return right.sum(), torch.tensor(right.numel())


def _made_up(head: Head, words: int, labels: int, given: Mapping[str, Any], where: str) -> TensorDataset:
    """Make up data: the second token decides a sequence's label, a token its own; the right choice begins with 1."""
    samples, length, padding = made_up_sizes(given, MADE_UP, where)
    length = max(2, length)
    generator = torch.Generator().manual_seed(settings.made_up_seed(where))
    shape = (samples, CHOICES, length) if head == "choice" else (samples, length)
    ids = torch.randint(min(2, words - 1), words, shape, generator=generator)
    target = ids % labels if head == "token" else ids[:, 1] % labels if head == "sequence" else None
    if target is None:
        target = torch.randint(CHOICES, (samples,), generator=generator)
        ids[torch.arange(samples), target, 0] = 1
    elif labels == 1:
        target = ids[:, 1] / words if head == "sequence" else target
    if not padding:
        return TensorDataset((ids,), (target,))
    least = torch.randint(length // 2 + 1, length + 1, (*shape[:-1], 1), generator=generator)
    mask = torch.arange(length) < least
    target = torch.where(mask, target, IGNORED) if head == "token" else target
    return TensorDataset((ids * mask, mask.long()), (target,))
