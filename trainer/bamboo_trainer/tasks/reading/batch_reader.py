"""The task's data by step and microbatch, read ahead in the background while the worker computes.

Not if the dataset draws from torch's generator: the background would draw from the very one that layers draw from. The
first batch, which is read in the foreground, shows whether it does. A `Prefetched` dataset has several readers.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch

from bamboo_trainer.data.prefetched import Prefetched
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.reading.reader_process import Batch
from bamboo_trainer.tasks.reading.readers import Readers
from bamboo_trainer.tasks.user_code import dataset_length, load_batch

MOST_AHEAD = 4  # batches, for each that a stage wants; those that a change of plan has made useless go first

Key = tuple[int, int, int]  # stage, step, microbatch


class BatchReader:
    """One for all stages of a worker. The dataset is called by one thread at a time, if it does not ask for readers.

    ahead: microbatches that a stage should expect.
    """

    def __init__(self, task: Task, samples: Callable[[int, int, int], Sequence[int]]) -> None:
        """samples: (step, microbatch, length of the dataset) -> which samples."""
        self._task, self._samples = task, samples
        self._calling = threading.Lock()
        self._expected: dict[Key, Future[Batch]] = {}
        self._draws: bool | None = None  # from torch's generator; None until the first batch
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data-reader")  # starts with its first job
        wanted = task.dataset if isinstance(task.dataset, Prefetched) else None
        self.ahead = wanted.ahead if wanted else 1
        self._readers = Readers(task, wanted) if wanted else None

    def batch(self, stage: int, step: int, microbatch: int) -> Batch:
        """Inputs and targets of that microbatch, not shared with another stage. Raises TaskError."""
        expected = self._expected.pop((stage, step, microbatch), None)
        if expected:
            return self._result(expected)
        before = torch.get_rng_state() if self._draws is None else None
        batch = self._read(step, microbatch)
        if before is not None:
            self._draws = not torch.equal(before, torch.get_rng_state())
        return batch

    def expect(self, stage: int, step: int, microbatch: int) -> None:
        """The stage will ask for that one soon. What goes wrong with it is raised when it does."""
        key = (stage, step, microbatch)
        if self._draws is not False or key in self._expected:
            return
        while len(self._expected) >= MOST_AHEAD * self.ahead:
            self._expected.pop(next(iter(self._expected))).cancel()
        self._expected[key] = self._submit(step, microbatch)

    def twice(self, stage: int, step: int, microbatch: int) -> tuple[Batch, Batch]:
        """The same microbatch, read two times; the next `batch` returns the first of them.

        The second time it is read as it will be from now on.
        """
        first = self.batch(stage, step, microbatch)
        second = self.batch(stage, step, microbatch) if self._draws else self._result(self._submit(step, microbatch))
        kept: Future[Batch] = Future()
        kept.set_result(first)
        self._expected[stage, step, microbatch] = kept
        return first, second

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """While nothing is read in the background."""
        with self._calling, self._readers.paused() if self._readers else nullcontext():
            yield

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._readers:
            self._readers.close()

    def _submit(self, step: int, microbatch: int) -> "Future[Batch]":
        if self._readers is None:
            return self._threads.submit(self._read, step, microbatch)
        return self._readers.submit(self._samples(step, microbatch, dataset_length(self._task)))

    def _result(self, future: "Future[Batch]") -> Batch:
        return self._readers.result(future) if self._readers else future.result()

    def _read(self, step: int, microbatch: int) -> Batch:
        with self._calling:
            return load_batch(self._task, self._samples(step, microbatch, dataset_length(self._task)))
