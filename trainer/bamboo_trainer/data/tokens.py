"""Sequences of tokens from files of tokens, with the next token as the target of each."""

from bisect import bisect_right
from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from bamboo_trainer.data.token_file import ByteSource, TokenFile
from bamboo_trainer.task import Parts

IGNORED: Final = -100  # a target that torch's cross_entropy leaves out


class Documents(StrEnum):
    """The treatment of the documents in a sequence; docs/data.md explains the values."""

    JOINED = "joined"
    MASKED = "masked"
    NUMBERED = "numbered"


class Tokens:
    """Sample i is sequence i of `length` tokens; sequences are adjacent and never reach into another file.

    sources: the files, in an order that is the same for all workers. Inputs and targets are int64 [samples, length].
    vocabulary: the largest one of the files. Raises ValueError.
    """

    def __init__(self, sources: Sequence[ByteSource], length: int, documents: Documents = Documents.JOINED) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        self.length = self.tokens_per_sample = length
        self._documents = documents
        self._files = [TokenFile(source) for source in sources]
        self._before = [0, *accumulate(max(0, file.header.tokens - 1) // length for file in self._files)]
        self.vocabulary = max((file.header.vocabulary for file in self._files), default=0)
        self.tokens = sum(file.header.tokens for file in self._files)
        if not self._before[-1]:
            names = ", ".join(file.name for file in self._files[:3])
            raise ValueError(f"{names}: no file has more than {length} tokens, the length of a sequence")

    def __len__(self) -> int:
        return self._before[-1]

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        windows = [self._window(index) for index in indices]
        tokens = torch.from_numpy(np.stack([window for window, _ in windows]))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if self._documents is Documents.JOINED:
            return (inputs,), (targets,)
        numbers = torch.from_numpy(np.stack([number for _, number in windows]))
        targets[numbers[:, 1:] != numbers[:, :-1]] = IGNORED
        if self._documents is Documents.MASKED:
            return (inputs,), (targets,)
        return (inputs, numbers[:, :-1].contiguous()), (targets,)

    def _window(self, index: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return length + 1 tokens, and for each the number of its document in this sequence."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard = bisect_right(self._before, index) - 1
        file, first = self._files[shard], (index - self._before[shard]) * self.length
        tokens = file.tokens(first, self.length + 1).astype(np.int64)
        if self._documents is Documents.JOINED:
            return tokens, tokens
        places = np.arange(first, first + self.length + 1, dtype=np.uint64)
        numbers = np.searchsorted(file.ends(), places, side="right")
        return tokens, numbers - numbers[0]
