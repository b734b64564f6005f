"""Several readers for one dataset."""

from collections.abc import Sequence

from bamboo_trainer.task import Dataset, Parts

MOST_READERS = 64
MOST_AHEAD = 256


def readers_of(dataset: object) -> "Prefetched | None":
    """Return the dataset's own `Prefetched`, if any: itself, or its attribute `prefetched` if it is built on one."""
    found = dataset if isinstance(dataset, Prefetched) else getattr(dataset, "prefetched", None)
    return found if isinstance(found, Prefetched) else None


class Prefetched:
    """A dataset that each worker reads with several readers at once, some microbatches ahead.

    readers: number of processes. ahead: microbatches that are read before they are needed, by default two for each
    reader. A dataset that draws from torch's global generator is not read ahead of time.

    Reader processes are forked from the worker when the first batch is read, must not use a GPU, and end with it.
    """

    def __init__(self, dataset: Dataset, readers: int = 2, ahead: int | None = None) -> None:
        if not 1 <= readers <= MOST_READERS:
            raise ValueError(f"readers must be from 1 to {MOST_READERS}, got {readers}")
        if ahead is not None and not 1 <= ahead <= MOST_AHEAD:
            raise ValueError(f"readAhead must be from 1 to {MOST_AHEAD}, got {ahead}")
        self.dataset, self.readers = dataset, readers
        self.ahead = ahead or 2 * readers
        self.tokens_per_sample = getattr(dataset, "tokens_per_sample", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        return self.dataset.batch(indices)
