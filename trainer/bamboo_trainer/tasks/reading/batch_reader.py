"""Reading of the task's data by step and microbatch, in the background while the worker computes.

There is no reading ahead if the dataset draws from torch's generator: the background would draw from the one that
layers draw from. The first batch, read in the foreground, shows whether it does. A `Prefetched` dataset has several
readers.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from typing import Final

import torch

from bamboo_trainer.data.prefetched import readers_of
from bamboo_trainer.task import Dataset, Task
from bamboo_trainer.tasks.reading.readers import Batch, Readers, Reading
from bamboo_trainer.tasks.user_code import load_batch

MOST_AHEAD = 4  # batches, for each that a stage wants; batches made useless by a change of plan go first
MOST_AT_ONCE: Final = 16  # batches that the thread reads when it is woken, if they are small:
AT_ONCE_BYTES: Final = 1 << 20

Key = tuple[int, int, int]  # stage, step, microbatch


class BatchReader:
    """The reader of all stages of a worker. One thread at a time calls the dataset, unless it asks for readers."""

    def __init__(self, task: Task, samples: Callable[[int, int, Dataset], Sequence[int]]) -> None:
        """Create the reader. samples: (step, microbatch, dataset) -> the samples' numbers."""
        self._task, self._samples = task, samples
        self._calling = threading.Lock()
        self._expected: dict[Key, Future[Batch] | Reading] = {}
        self._draws: bool | None = None  # from torch's generator; None until the first batch
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data-reader")  # starts with its first job
        wanted = readers_of(task.dataset)
        self._ahead = wanted.ahead if wanted else 1
        self._at_once = 1
        self._readers = Readers(task, wanted) if wanted else None

    def batch(self, stage: int, step: int, microbatch: int) -> Batch:
        """Return inputs and targets of that microbatch, not shared with another stage. Raises TaskError."""
        expected = self._expected.pop((stage, step, microbatch), None)
        if expected:
            return self._result(expected)
        before = torch.get_rng_state() if self._draws is None else None
        batch = self._read(step, microbatch)
        if before is not None:
            self._draws = not torch.equal(before, torch.get_rng_state())
            self._at_once = max(1, min(MOST_AT_ONCE, AT_ONCE_BYTES // max(1, _bytes(batch))))
        return batch

    def expect(self, stage: int, coming: Iterable[tuple[int, int]]) -> None:
        """Read the next of these steps' microbatches, which the stage will request in this order.

        Errors are raised when the batch is requested. Waking a thread takes longer than reading a small batch, so
        several of these are read at once.
        """
        if self._draws is not False:
            return
        keys = ((stage, step, microbatch) for step, microbatch in coming)
        new = [key for key in islice(keys, self._ahead) if key not in self._expected]
        if new and self._readers is None:
            new = list(islice(chain(new, (key for key in keys if key not in self._expected)), self._at_once))
        while new and len(self._expected) > MOST_AHEAD * max(self._ahead, self._at_once) - len(new):
            self._expected.pop(next(iter(self._expected))).cancel()
        if new and self._readers:
            self._expected |= {key: self._readers.submit(self._numbers(*key[1:])) for key in new}
        elif new:
            futures = {key: Future[Batch]() for key in new}
            self._expected |= futures
            self._threads.submit(self._read_all, futures)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Stop reading in the background while in this context."""
        with self._calling:
            yield

    def close(self) -> None:
        for future in self._expected.values():
            future.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._readers:
            self._readers.close()

    def _read_all(self, futures: "dict[Key, Future[Batch]]") -> None:
        """Read one after the other; each result is available at once."""
        for (_, step, microbatch), future in futures.items():
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._read(step, microbatch))
            except BaseException as error:
                future.set_exception(error)

    def _result(self, expected: "Future[Batch] | Reading") -> Batch:
        if isinstance(expected, Future):
            return expected.result()
        assert self._readers is not None
        return self._readers.result(expected)

    def _numbers(self, step: int, microbatch: int) -> Sequence[int]:
        return self._samples(step, microbatch, self._task.dataset)

    def _read(self, step: int, microbatch: int) -> Batch:
        with self._calling:
            return load_batch(self._task, self._numbers(step, microbatch))


def _bytes(batch: Batch) -> int:
    return sum(part.nbytes for parts in batch for part in parts)
