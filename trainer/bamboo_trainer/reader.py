"""The task's data by step and microbatch, read ahead in the background while the worker computes."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from bamboo_trainer.task import Parts, Task
from bamboo_trainer.user_code import load_batch

MOST_AHEAD = 4  # batches; those that a change of plan has made useless go first

Batch = tuple[Parts, Parts]  # inputs and targets


class Reader:
    """One for all stages of a worker. The dataset is called by one thread at a time."""

    def __init__(self, task: Task, samples: Callable[[int, int, int], Sequence[int]]) -> None:
        """samples: (step, microbatch, length of the dataset) -> which samples."""
        self._task, self._samples = task, samples
        self._calling = threading.Lock()
        self._expected: dict[tuple[int, int], Future[Batch]] = {}
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data-reader")  # starts with its first job

    def batch(self, step: int, microbatch: int) -> Batch:
        """Inputs and targets of that microbatch. Raises TaskError."""
        expected = self._expected.pop((step, microbatch), None)
        return expected.result() if expected else self._read(step, microbatch)

    def expect(self, step: int, microbatch: int) -> None:
        """That one will be asked for soon. What goes wrong with it is raised when it is."""
        if (step, microbatch) in self._expected:
            return
        while len(self._expected) >= MOST_AHEAD:
            self._expected.pop(next(iter(self._expected))).cancel()
        self._expected[step, microbatch] = self._threads.submit(self._read, step, microbatch)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, step: int, microbatch: int) -> Batch:
        with self._calling:
            return load_batch(self._task, self._samples(step, microbatch, len(self._task.dataset)))
