"""Samples of near lengths in one microbatch, so that little of it is padding."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

from bamboo_trainer.data.order import Passes, permute, pure_seed
from bamboo_trainer.task import Dataset, Order, Parts, own_order

MICROBATCHES: Final = 50  # whose samples are put together by their lengths
Lengths = Sequence[int] | Callable[[], Sequence[int]]


class ByLength:
    """A dataset whose microbatches have samples of near lengths (docs/data.md says how).

    lengths: of all samples, or what finds them when they are needed. microbatches: of so many that follow each other
    the samples are sorted by length. Raises ValueError.
    """

    def __init__(self, dataset: Dataset, lengths: Lengths, microbatches: int = MICROBATCHES) -> None:
        if microbatches < 1:
            raise ValueError(f"microbatches must be at least 1, got {microbatches}")
        self._dataset = dataset
        inner: Order = own_order(dataset) or Passes(len(dataset))
        self.order = OrderByLength(inner, lengths, microbatches)
        self.tokens_per_sample: int | None = getattr(dataset, "tokens_per_sample", None)

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        return self._dataset.batch(indices)


class OrderByLength:
    """The order of a `ByLength`. inner: the order that it rearranges."""

    def __init__(self, inner: Order, lengths: Lengths, microbatches: int) -> None:
        self._inner, self._lengths, self._microbatches = inner, lengths, microbatches
        self._window = lru_cache(maxsize=4)(self._rearranged)  # each microbatch of a window asks for it

    @property
    def samples_of_pass(self) -> int:
        return self._inner.samples_of_pass

    def microbatch(self, seed: int, first: int, size: int) -> tuple[int, ...]:
        window, place = divmod(first, self._microbatches * size)
        return self._window(seed, window, size)[place : place + size]

    def _rearranged(self, seed: int, window: int, size: int) -> tuple[int, ...]:
        """The samples of that window. What is of different passes stays apart."""
        place, end = (number * self._microbatches * size for number in (window, window + 1))
        found: list[int] = []
        while place < end:
            begins_next = (place // self.samples_of_pass + 1) * self.samples_of_pass
            part = min(end, begins_next) - place
            found += self._of_one_pass(seed, place, part, size)
            place += part
        return tuple(found)

    def _of_one_pass(self, seed: int, place: int, count: int, size: int) -> list[int]:
        """The samples of so many places from that place on. Of microbatches that two passes share both parts are the
        shortest ones.
        """
        if callable(self._lengths):
            self._lengths = self._lengths()
        samples = sorted(self._inner.microbatch(seed, place, count), key=self._lengths.__getitem__)
        head = min(-place % size, count)
        whole = (count - head) // size
        tail = count - head - whole * size
        bodies = [samples[head + tail + n * size :][:size] for n in range(whole)]
        key = pure_seed("by length", seed, place)
        shuffled = [bodies[permute(n, whole, key)] for n in range(whole)]
        return [*samples[:head], *(sample for body in shuffled for sample in body), *samples[head : head + tail]]
