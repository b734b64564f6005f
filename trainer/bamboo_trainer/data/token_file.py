"""Files of token ids; any part can be read without loading the whole file. All numbers are little-endian:

| Bytes | What |
| --- | --- |
| 0 to 7 | `BAMBOOTK` |
| 8 to 11 | uint32: version of the format, 1 |
| 12 to 15 | uint32: bytes of a token, 2 or 4 |
| 16 to 23 | uint64: number of tokens |
| 24 to 31 | uint64: number of documents |
| 32 to 39 | uint64: size of the vocabulary; every token is below it |
| 40 to 63 | zero |
| 64 on | the tokens, uint16 or uint32, one document after the other; then zeros up to a multiple of 8 bytes |
| then | uint64 for each document: the number of tokens up to its end |
"""

import struct
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, BinaryIO, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from bamboo_trainer.data.sources import Source
from bamboo_trainer.task import Parts

_MAGIC: Final = b"BAMBOOTK"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sIIQQQ24x")
_TYPES: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
LARGEST_VOCABULARY: Final = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHeader:
    """The header of a file of tokens."""

    width: int  # bytes of a token
    tokens: int
    documents: int
    vocabulary: int  # its size

    def packed(self) -> bytes:
        return _HEADER.pack(_MAGIC, _VERSION, self.width, self.tokens, self.documents, self.vocabulary)

    @property
    def ends_at(self) -> int:
        """The offset in bytes of the list of the documents' ends."""
        return _HEADER.size + _padded(self.tokens * self.width)

    @property
    def size(self) -> int:
        """The size of the whole file, in bytes."""
        return self.ends_at + 8 * self.documents


class TokenFile:
    """A reader of a file of tokens. Raises ValueError unless the header is valid and fits the file's size."""

    def __init__(self, source: Source) -> None:
        self.name, self._source = source.name, source
        self.header = _parsed(source)
        self._type = _TYPES[self.header.width]
        self._ends: NDArray[np.uint64] | None = None

    def tokens(self, first: int, count: int) -> NDArray[Any]:
        """Return `count` tokens from `first` on, as a read-only array of uint16 or uint32."""
        assert 0 <= first <= first + count <= self.header.tokens
        begin = _HEADER.size + first * self.header.width
        return np.frombuffer(self._source.read(begin, begin + count * self.header.width), self._type)

    def ends(self) -> NDArray[np.uint64]:
        """Return token counts up to each document's end. Raises ValueError if they decrease or the last is wrong."""
        if self._ends is None:
            ends = np.frombuffer(self._source.read(self.header.ends_at, self.header.size), np.dtype("<u8"))
            if len(ends) and (int(ends[-1]) != self.header.tokens or bool(np.any(ends[1:] < ends[:-1]))):
                raise ValueError(f"{self.name} is damaged: its documents do not end one after the other")
            self._ends = ends
        return self._ends

    def numbers(self, first: int, count: int) -> NDArray[Any]:
        """Return, for each of `count` (at least 1) tokens from `first` on, the number of its document, counted from 0
        for the first token's document. Empty documents count, too. Raises ValueError like `ends`.
        """
        places = np.arange(first, first + count, dtype=np.uint64)
        numbers: NDArray[Any] = np.searchsorted(self.ends(), places, side="right")
        numbers -= numbers[0]
        return numbers


class TokenWriter:
    """A writer of a file of tokens. The file is complete once the writer's `with` block has ended without an error.

    vocabulary: its size, which decides the number of bytes of a token. Raises ValueError, OSError.
    """

    def __init__(self, file: BinaryIO, vocabulary: int) -> None:
        if not 1 <= vocabulary <= LARGEST_VOCABULARY:
            raise ValueError(f"a vocabulary of {vocabulary}: expected 1 to {LARGEST_VOCABULARY}")
        self._file, self._vocabulary = file, vocabulary
        self._type = _TYPES[2 if vocabulary <= 1 << 16 else 4]
        self._ends = array("Q")
        self.tokens = 0
        file.write(bytes(_HEADER.size))

    @property
    def documents(self) -> int:
        return len(self._ends)

    def add(self, tokens: Any) -> None:
        """Add a document: bytes, each of them a token, or a sequence of token ids. Raises ValueError for a token
        outside of the vocabulary.
        """
        numbers = np.frombuffer(tokens, np.uint8) if isinstance(tokens, bytes) else np.asarray(tokens, dtype=np.int64)
        for token in (int(numbers.min()), int(numbers.max())) if len(numbers) else ():
            if not 0 <= token < self._vocabulary:
                raise ValueError(f"there is a token {token} in a vocabulary of {self._vocabulary}")
        self._file.write(numbers.astype(self._type).tobytes())
        self.tokens += len(numbers)
        self._ends.append(self.tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Write the rest of the file, and its header, unless there was an error."""
        if kind is not None:
            return
        written = self.tokens * self._type.itemsize
        self._file.write(bytes(_padded(written) - written))
        self._file.write(np.asarray(self._ends, dtype="<u8").tobytes())
        header = TokenHeader(
            width=self._type.itemsize,
            tokens=self.tokens,
            documents=self.documents,
            vocabulary=self._vocabulary,
        )
        self._file.seek(0)
        self._file.write(header.packed())


def _parsed(source: Source) -> TokenHeader:
    wrong = f"{source.name} is not a file of tokens that `bamboo tokenize` has written"
    if source.size < _HEADER.size:
        raise ValueError(wrong)
    magic, version, width, tokens, documents, vocabulary = _HEADER.unpack(source.read(0, _HEADER.size))
    if magic != _MAGIC:
        raise ValueError(wrong)
    if version != _VERSION:
        raise ValueError(f"{source.name} has version {version} of the format, expected {_VERSION}")
    header = TokenHeader(width=width, tokens=tokens, documents=documents, vocabulary=vocabulary)
    if width not in _TYPES or header.size != source.size:
        raise ValueError(f"{source.name} is damaged: it has {source.size} bytes, its header says {header.size}")
    return header


def _padded(size: int) -> int:
    return -(-size // 8) * 8


IGNORED: Final = -100  # a target that torch's cross_entropy leaves out


class Documents(StrEnum):
    """The treatment of several documents in a sequence. joined: as one text. numbered: the target at a document's last
    token does not count (-100), and a second input has the number of each token's document.
    """

    JOINED = "joined"
    NUMBERED = "numbered"


class Tokens:
    """A dataset of adjacent sequences of `length` tokens; no sequence reaches into another file.

    sources: the files, in an order that must be equal on all workers. Inputs and targets are int64 [samples, length].
    vocabulary: the largest vocabulary size of the files. Raises ValueError.
    """

    def __init__(self, sources: Sequence[Source], length: int, documents: Documents = Documents.JOINED) -> None:
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
        places = [self._place(index) for index in indices]
        rows = [file.tokens(first, self.length + 1).astype(np.int64) for file, first in places]
        tokens = torch.from_numpy(np.stack(rows))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if self._documents is Documents.JOINED:
            return (inputs,), (targets,)
        numbers = torch.from_numpy(np.stack([file.numbers(first, self.length + 1) for file, first in places]))
        targets[numbers[:, 1:] != numbers[:, :-1]] = IGNORED
        return (inputs, numbers[:, :-1].contiguous()), (targets,)

    def _place(self, index: int) -> tuple[TokenFile, int]:
        """Return the file of a sample, and the number of its first token there. Raises IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard = bisect_right(self._before, index) - 1
        return self._files[shard], (index - self._before[shard]) * self.length
