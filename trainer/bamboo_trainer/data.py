"""Which samples a microbatch holds, and two datasets.

Every random choice is a pure function of numbers, so any worker can derive it at any time and in any order.
"""

import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch

from bamboo_trainer.task import Parts

_ROUNDS = 6
_MASK = (1 << 64) - 1
STDLIB_BYTES = 4_000_000


def pure_seed(purpose: str, *numbers: int) -> int:
    """A seed in [0, 2**63) that depends on nothing but the arguments (not on the process, unlike `hash`)."""
    text = ":".join([purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def permute(index: int, length: int, key: int) -> int:
    """The image of `index` under a pseudo-random permutation of range(length), without a table.

    A Feistel network on the next even power of two, walked until the value falls into the range again.
    """
    if not 0 <= index < length:
        raise ValueError(f"index {index} is not in range({length})")
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for round_ in range(_ROUNDS):
            left, right = right, left ^ (_mix(right ^ _mix(key + round_)) & low)
        index = left << half | right
        if index < length:
            return index


def step_samples(seed: int, step: int, global_batch: int, length: int) -> tuple[int, ...]:
    """The sample numbers of a step; each epoch (`length` numbers in a row) visits each sample once."""
    return _samples(seed, step * global_batch, global_batch, length)


def microbatch_samples(
    seed: int, step: int, microbatch: int, micro_batch_size: int, global_batch: int, length: int
) -> tuple[int, ...]:
    """The part of `step_samples` that belongs to one microbatch of the step."""
    return _samples(seed, step * global_batch + microbatch * micro_batch_size, micro_batch_size, length)


def stdlib_text(limit: int = STDLIB_BYTES) -> bytes:
    """The sources of this Python's standard library (top level, by name): real text on every machine."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return bytes(text[:limit])


class TextDataset:
    """Bytes as tokens: sample i is window i of `context` bytes and, as targets, the same shifted by one."""

    def __init__(self, text: bytes, context: int) -> None:
        if context < 1:
            raise ValueError(f"context must be at least 1, got {context}")
        if len(text) <= context:
            raise ValueError(f"the text has {len(text)} bytes, fewer than context + 1 = {context + 1}")
        self.context = context
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self._text) - 1) // self.context

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        """Inputs and targets, both int64 [samples, context]."""
        width = self.context
        windows = torch.stack([self._text[i * width : (i + 1) * width + 1] for i in indices]).long()
        return (windows[:, :-1].contiguous(),), (windows[:, 1:].contiguous(),)


class TensorDataset:
    """Inputs and targets held in memory; dimension 0 numbers the samples."""

    def __init__(self, inputs: Parts, targets: Parts) -> None:
        lengths = {len(part) for part in (*inputs, *targets)}
        if len(lengths) != 1:
            raise ValueError(f"all tensors must have the same number of samples, got {sorted(lengths)}")
        self._inputs, self._targets = inputs, targets
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        chosen = torch.tensor(indices, dtype=torch.int64)
        return tuple(p[chosen] for p in self._inputs), tuple(p[chosen] for p in self._targets)


def _samples(seed: int, first: int, count: int, length: int) -> tuple[int, ...]:
    if length < 1:
        raise ValueError("the dataset has no samples")
    keys = {epoch: pure_seed("data", seed, epoch) for epoch in {p // length for p in range(first, first + count)}}
    return tuple(permute(p % length, length, keys[p // length]) for p in range(first, first + count))


def _mix(value: int) -> int:
    """splitmix64's finalizer: spreads every input bit over all output bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
