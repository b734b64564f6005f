"""Pairs of sequences as encoder-decoder models take them: a source, and the target that the decoder foretells."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from bamboo_trainer.data import TensorDataset, dataset_from, source_names
from bamboo_trainer.data.prefetched import readers_of
from bamboo_trainer.models.parts import settings
from bamboo_trainer.models.parts.sequences import IGNORED, Padding, check_tokens, made_up_sizes, trimmed_width
from bamboo_trainer.task import Dataset, Parts

Seq2Seq = Literal["seq2seq"]
NAMES: Final = ("input_ids", "attention_mask", "decoder_input_ids")
HALVES: Final = ("encoder", "decoder")  # what models call the modules that have their blocks
MADE_UP: Final = {"length": 16, "samples": 512}


class SourcesAndTargets:
    """Inputs: int64 [samples, length], a mask of those that count, and what the decoder is given, [samples, length of
    the targets]. Targets: int64 [samples, their length], of which -100 does not count.

    The decoder is given the token that begins a target, and behind it the target's tokens but the last one, as
    transformers makes it of labels. source: gives tokens, perhaps a mask, and the targets. words: size of the
    vocabulary. begin, pad: the numbers of that first token, and of what stands where nothing counts. where: the
    config's key, for messages. padding, mixed, names: as of `Sequences`.
    """

    def __init__(
        self,
        source: Dataset,
        words: int,
        begin: int,
        pad: int,
        where: str = "data",
        *,
        padding: Padding | None = None,
        mixed: bool = False,
    ) -> None:
        self._source, self._words, self._begin, self._pad, self._where = source, words, begin, pad, where
        self._padding, self._mixed = padding or Padding(), mixed
        given, targets = source.batch([0])
        fitting = 1 <= len(given) <= 2 and len(targets) - mixed == 1
        if not fitting or any(part.dim() != 2 for part in (*given, targets[0])):
            raise ValueError(
                f"{where}: expected tokens [samples, length], perhaps a mask, and as targets tokens [samples, their "
                f"length], got inputs {[list(t.shape) for t in given]} and targets {[list(t.shape) for t in targets]}"
            )
        self.names, self.masked = NAMES, len(given) > 1
        self.order = self._padding.order(source, self.masked, where)
        self.prefetched = readers_of(source)
        self.length = max(int(given[0].shape[-1]), int(targets[0].shape[-1]))
        self.tokens_per_sample: int | None = None

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        """Raises ValueError for a token outside of the vocabulary."""
        given, (target, *more) = self._source.batch(indices)
        ids, target = given[0].long(), target.long()
        mask = given[1].long() if self.masked else torch.ones_like(ids)
        counted = target != IGNORED
        check_tokens(ids, self._words, self._where)
        check_tokens(target[counted], self._words, self._where)
        trim = self._padding.trim
        ids, mask = (part[:, : trimmed_width(mask, trim)].contiguous() for part in (ids, mask))
        target = target[:, : trimmed_width(counted, trim)].contiguous()
        return (ids, mask, self._shifted(target)), (target, *more)

    def _shifted(self, target: Tensor) -> Tensor:
        before = target[:, :-1].masked_fill(target[:, :-1] == IGNORED, self._pad)
        return torch.cat([torch.full_like(target[:, :1], self._begin), before], dim=1)


def open_pairs_of(data: Mapping[str, Any], config: Any, words: int, where: str = "data") -> SourcesAndTargets:
    """The samples that data describe: {"kind": "random", "length", "samples", "padding"} are made up, and the default;
    the other kinds are those of `bamboo_trainer.data.dataset_from`. config: the model's. Raises ValueError.
    """
    given = dict(data)
    padding = Padding.taken_from(given, where)
    source = dataset_from({"kind": settings.MADE_UP, **given}, where, {settings.MADE_UP: partial(_made_up, words)})
    pad = getattr(config, "pad_token_id", None) or 0
    said = getattr(config, "decoder_start_token_id", None)
    begin = pad if said is None else int(said)
    return SourcesAndTargets(source, words, begin, pad, where, padding=padding, mixed=bool(source_names(given)))


def _made_up(words: int, given: Mapping[str, Any], where: str) -> TensorDataset:
    """The target is the source from its end to its beginning."""
    samples, length, padded = made_up_sizes(given, MADE_UP, where)
    length = max(2, length)
    generator = torch.Generator().manual_seed(settings.made_up_seed(where))
    ids = torch.randint(min(4, words - 1), words, (samples, length), generator=generator)
    if not padded:
        return TensorDataset((ids,), (ids.flip(1),))
    count = torch.randint(length // 2 + 1, length + 1, (samples, 1), generator=generator)
    places = torch.arange(length)
    mask = places < count
    backwards = ids.gather(1, (count - 1 - places).clamp(min=0))
    return TensorDataset((ids * mask, mask.long()), (torch.where(mask, backwards, IGNORED),))


def lists_of_blocks(model: nn.Module) -> Iterator[str]:
    """The names of the lists of an encoder's and a decoder's blocks, in the order of their calls."""
    for name, module in model.named_modules():
        above = name.rpartition(".")[0].rpartition(".")[2]
        if isinstance(module, nn.ModuleList) and above in HALVES:
            yield name
