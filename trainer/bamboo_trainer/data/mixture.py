"""Several datasets as one, each with its share of the samples at any time."""

import heapq
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property, partial
from itertools import accumulate, pairwise
from math import lcm
from typing import Any

import torch
from torch.utils._pytree import tree_map

from bamboo_trainer.data.order import permute, pure_seed
from bamboo_trainer.task import Dataset, Parts, Weighted, own_order


class Ends(StrEnum):
    """Which source's end is the end of a pass over a mixture.

    LONGEST: the pass ends when each source has been visited as a whole; short ones begin again meanwhile. SHORTEST: it
    ends with the first source of which nothing is left, and all begin again.
    """

    LONGEST = "longest"
    SHORTEST = "shortest"


class Mixture:
    """Several datasets as one. The samples are numbered source by source; `order` says when each is trained on.

    sources: by name, the weight and the dataset of each. ends: which source ends a pass (docs/data.md).

    The inputs and targets are those of the sources, whose forms must be equal, and behind the targets the number of
    each sample's source, int64 [samples]; `by_source` makes metrics of it. Raises ValueError.
    """

    def __init__(self, sources: Mapping[str, tuple[float, Dataset]], ends: Ends | str = Ends.LONGEST) -> None:
        if len(sources) < 2:
            raise ValueError(f"a mixture must have at least two sources, got {len(sources)}")
        for name, (weight, dataset) in sources.items():
            if isinstance(weight, bool) or not 0 < weight <= sys.float_info.max:
                raise ValueError(f"the weight of {name} must be a positive number, got {weight!r}")
            if own_order(dataset):
                raise ValueError(f"{name} has an order of its own, which a source of a mixture cannot have")
            if len(dataset) < 1:
                raise ValueError(f"{name} has no samples")
        self.names = tuple(sources)
        self._sources = [dataset for _, dataset in sources.values()]
        lengths = tuple(map(len, self._sources))
        self._begins = (0, *accumulate(lengths))
        weights = tuple(Fraction(str(weight)) for weight, _ in sources.values())
        self.order = MixtureOrder(lengths, weights, Ends(ends))
        tokens = {getattr(dataset, "tokens_per_sample", None) for dataset in self._sources}
        self.tokens_per_sample: int | None = tokens.pop() if len(tokens) == 1 else None
        with torch.random.fork_rng(devices=[]):
            self.batch(self._begins[:-1])  # one sample of each: have they one form?

    def __len__(self) -> int:
        return self._begins[-1]

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        found: list[tuple[Parts, Parts]] = []
        places: list[int] = []
        for number, (begin, end) in enumerate(pairwise(self._begins)):
            here = [place for place, index in enumerate(indices) if begin <= index < end]
            if here:
                inputs, targets = self._sources[number].batch([indices[place] - begin for place in here])
                found.append((inputs, (*targets, torch.full((len(here),), number))))
                places += here
        self._check(found)
        back = torch.tensor(places).argsort()
        return _joined([inputs for inputs, _ in found], back), _joined([targets for _, targets in found], back)

    def _check(self, found: Sequence[tuple[Parts, Parts]]) -> None:
        """Raises ValueError if these cannot be joined."""
        forms = {int(targets[-1][0]): f"{_form(inputs)} and {_form(targets[:-1])}" for inputs, targets in found}
        first = min(forms)
        for number, form in forms.items():
            if form != forms[first]:
                raise ValueError(
                    f"the sources of a mixture must have inputs and targets of one form, got {forms[first]} of "
                    f"{self.names[first]}, {form} of {self.names[number]}"
                )


def _joined(found: Sequence[Parts], back: torch.Tensor) -> Parts:
    return tuple(torch.cat(parts)[back] for parts in zip(*found, strict=True))


def _form(parts: Parts) -> str:
    return ", ".join(f"{str(part.dtype).removeprefix('torch.')} {list(part.shape[1:])}" for part in parts) or "nothing"


def by_source(loss: Callable[[Any, Any], Any], names: Sequence[str]) -> dict[str, Callable[[Any, Any], Weighted]]:
    """Metrics for `Task.metrics` or an evaluation: `loss_NAME` is the loss of the samples of one source of a mixture.

    loss: what the task has. names: of the sources, `Mixture.names`.
    """
    return {f"loss_{name}": partial(_of_source, loss, number) for number, name in enumerate(names)}


def _of_source(loss: Callable[[Any, Any], Any], number: int, outputs: Any, targets: Any) -> Weighted:
    sources = targets[-1]
    without_data = hasattr(sources, "fake_mode")  # a task that is only looked at: all samples are the source's
    rows = torch.arange(len(sources)) if without_data else (sources == number).nonzero().flatten()
    if not len(rows):
        return Weighted(torch.zeros(()), 0)
    found = loss(*tree_map(lambda part: part[rows], (outputs, targets)))
    return found if isinstance(found, Weighted) else Weighted(found * len(rows), len(rows))


@dataclass(frozen=True, slots=True)
class _Fork:
    """A place where samples are dealt out between two groups of sources, each a source's number or another fork.

    weight: of the left group, and of both.
    """

    left: "_Fork | int"
    right: "_Fork | int"
    weight: tuple[int, int]

    def to_left(self, count: int) -> int:
        """How many of the first `count` samples go to the left: its share, rounded."""
        left, both = self.weight
        return (2 * count * left + both) // (2 * both)


@dataclass(frozen=True)
class MixtureOrder:
    """The order of a `Mixture`. lengths, weights: of the sources.

    Samples are dealt out in a tree of forks, those of small weights far from its root (Huffman's), by rounding the
    share of one side: so a source's number of samples before any place is found without counting, is never off by two,
    and grows by one or not at all.
    """

    lengths: tuple[int, ...]
    weights: tuple[Fraction, ...]
    ends: Ends

    @cached_property
    def samples_of_pass(self) -> int:
        ends = [self._place_after(source, length) for source, length in enumerate(self.lengths)]
        return max(ends) if self.ends is Ends.LONGEST else min(ends)

    def microbatch(self, seed: int, first: int, size: int) -> tuple[int, ...]:
        return tuple(self._sample(seed, place) for place in range(first, first + size))

    def counts(self, samples: int) -> tuple[int, ...]:
        """How many of the first so many samples of a pass are of each source."""
        found = [0] * len(self.lengths)
        left: list[tuple[_Fork | int, int]] = [(self._root, samples)]
        while left:
            at, count = left.pop()
            if isinstance(at, int):
                found[at] = count
            else:
                left += [(at.left, at.to_left(count)), (at.right, count - at.to_left(count))]
        return tuple(found)

    def _sample(self, seed: int, place: int) -> int:
        around = 0
        if self.ends is Ends.SHORTEST:
            around, place = divmod(place, self.samples_of_pass)
        source, before = self._source(place)
        length = self.lengths[source]
        if self.ends is Ends.LONGEST:
            around, before = divmod(before, length)
        return sum(self.lengths[:source]) + permute(before, length, pure_seed("mixture", seed, source, around))

    def _source(self, place: int) -> tuple[int, int]:
        """The source of the sample at that place, and how many of its samples come before."""
        at, count = self._root, place
        while not isinstance(at, int):
            left = at.to_left(count)
            at, count = (at.left, left) if at.to_left(count + 1) > left else (at.right, count - left)
        return at, count

    def _place_after(self, source: int, count: int) -> int:
        """How many samples of all have to come for that source to have had so many."""
        low, high = count, 1
        while self.counts(high)[source] < count:
            high *= 2
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.counts(middle)[source] >= count else (middle + 1, high)
        return low

    @cached_property
    def _root(self) -> _Fork | int:
        whole = lcm(*(weight.denominator for weight in self.weights))
        groups: list[tuple[int, int, _Fork | int]] = [
            (int(weight * whole), source, source) for source, weight in enumerate(self.weights)
        ]
        heapq.heapify(groups)
        while len(groups) > 1:
            (small, first, right), (large, second, left) = heapq.heappop(groups), heapq.heappop(groups)
            fork = _Fork(left, right, (large, small + large))
            heapq.heappush(groups, (small + large, min(first, second), fork))
        return groups[0][2]
