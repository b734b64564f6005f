"""Several datasets as one, each with its share of the samples."""

import sys
from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import Final

import torch

from bamboo_trainer.task import Dataset, Parts

MOST_SHARES: Final = 1000  # weights without a simple ratio are rounded to this many parts


class Mixture:
    """Several datasets as one, which deals out the samples by weight.

    sources: the weight and the dataset of each. Their inputs and targets must have the same types and shapes.

    Sample i is a pure function of i. In rounds of at most MOST_SHARES samples each source has its share, spread evenly,
    and goes through its own samples in their order, again and again. The mixture has enough rounds to visit each source
    as a whole. Raises ValueError.
    """

    def __init__(self, sources: Sequence[tuple[float, Dataset]]) -> None:
        if len(sources) < 2:
            raise ValueError(f"a mixture must have at least two sources, got {len(sources)}")
        for number, (weight, dataset) in enumerate(sources):
            if isinstance(weight, bool) or not 0 < weight <= sys.float_info.max:
                raise ValueError(f"the weight of source {number} must be a positive number, got {weight!r}")
            if len(dataset) < 1:
                raise ValueError(f"source {number} has no samples")
        self._sources = [dataset for _, dataset in sources]
        self._shares = _shares([weight for weight, _ in sources])
        self._round = _dealt(self._shares)
        rounds = max(-(-len(one) // share) for one, share in zip(self._sources, self._shares, strict=True))
        self._length = rounds * len(self._round)
        tokens = {getattr(dataset, "tokens_per_sample", None) for dataset in self._sources}
        self.tokens_per_sample: int | None = tokens.pop() if len(tokens) == 1 else None
        with torch.random.fork_rng(devices=[]):
            self.batch([self._round.index((source, 0)) for source in range(len(sources))])  # must fit together

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        chosen = [self._place(index) for index in indices]
        found: dict[int, tuple[Parts, Parts]] = {}
        places: list[int] = []
        for source, dataset in enumerate(self._sources):
            here = [place for place, (owner, _) in enumerate(chosen) if owner == source]
            if here:
                found[source] = dataset.batch([chosen[place][1] for place in here])
                places += here
        _check(found)
        back = torch.tensor(places).argsort()
        inputs, targets = zip(*found.values(), strict=True)
        return _joined(inputs, back), _joined(targets, back)

    def _place(self, index: int) -> tuple[int, int]:
        """Return the source of a sample, and its number there."""
        rounds, place = divmod(index, len(self._round))
        source, number = self._round[place]
        return source, (rounds * self._shares[source] + number) % len(self._sources[source])


def _shares(weights: Sequence[float]) -> list[int]:
    """Return each source's samples in a round: exactly its share, if at most MOST_SHARES parts suffice."""
    exact = [Fraction(str(weight)) for weight in weights]
    parts = [weight / sum(exact) for weight in exact]
    whole = min(MOST_SHARES, lcm(*(part.denominator for part in parts)))
    return [max(1, round(part * whole)) for part in parts]


def _dealt(shares: Sequence[int]) -> list[tuple[int, int]]:
    """Return a round's samples, spread evenly: the source, and the number of its earlier samples in the round."""
    places = [((2 * n + 1) / (2 * share), source, n) for source, share in enumerate(shares) for n in range(share)]
    return [(source, number) for _, source, number in sorted(places)]


def _check(found: dict[int, tuple[Parts, Parts]]) -> None:
    """Raise ValueError if these cannot be joined."""
    forms = {source: f"{_form(inputs)} and {_form(targets)}" for source, (inputs, targets) in found.items()}
    first = min(forms)
    for source, form in forms.items():
        if form != forms[first]:
            raise ValueError(
                f"the sources of a mixture must have inputs and targets of one form, got {forms[first]} of source "
                f"{first}, {form} of source {source}"
            )


def _joined(found: Sequence[Parts], back: torch.Tensor) -> Parts:
    return tuple(torch.cat(parts)[back] for parts in zip(*found, strict=True))


def _form(parts: Parts) -> str:
    return ", ".join(f"{str(part.dtype).removeprefix('torch.')} {list(part.shape[1:])}" for part in parts) or "nothing"
