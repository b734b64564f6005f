"""The order of a dataset's samples: seeds, pseudo-random permutations, and the samples at each position of a job.

Every random choice is a pure function of its arguments, so any worker can derive it at any time and in any order.
"""

import hashlib

_ROUNDS = 6
_MASK = (1 << 64) - 1


def pure_seed(purpose: str, *numbers: int) -> int:
    """Return a seed in [0, 2**63) that depends only on the arguments (not on the process, unlike `hash`)."""
    text = ":".join([purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def permute(index: int, length: int, key: int) -> int:
    """Return the image of `index` under a pseudo-random permutation of range(length), without a table.

    Apply a Feistel network over an even number of bits until the value is in the range (cycle walking). key: chooses
    the permutation. Raises ValueError for an index outside of the range.
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


def sample_numbers(seed: int, first: int, count: int, length: int) -> tuple[int, ...]:
    """Return the indices in the dataset of a job's samples `first` to `first + count - 1`. A whole pass over the
    dataset visits each sample once, in an order that depends on the seed and the pass's number.

    seed: the job's seed. length: the number of the dataset's samples. Raises ValueError for an empty dataset.
    """
    if length < 1:
        raise ValueError("the dataset has no samples")
    places = range(first, first + count)
    keys = {number: pure_seed("data", seed, number) for number in {place // length for place in places}}
    return tuple(permute(place % length, length, keys[place // length]) for place in places)


def _mix(value: int) -> int:
    """Return the low 64 bits of the value, mixed by a step of splitmix64: each one affects all bits of the result."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
