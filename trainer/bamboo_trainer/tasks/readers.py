"""Reading of the task's batches, prefetched in the background while the worker computes.

Nothing is prefetched if the dataset draws from torch's generator, which layers use, too. The first batch, read in the
foreground, shows whether the dataset does.

Separate processes read a `Prefetched` dataset (`Readers`). Each ends with the worker, even if the worker is killed, and
keeps none of the worker's connections open.
"""

import contextlib
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

import torch

from bamboo_core.complaints import said_by
from bamboo_core.orphans import end_with
from bamboo_trainer.data.datasets import Prefetched, readers_of
from bamboo_trainer.task import Dataset, Parts, Task
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import load_batch

logger = logging.getLogger(__name__)

Batch = tuple[Parts, Parts]  # inputs and targets
MOST_ENDS: Final = 3  # of reader processes that were to read one batch
SILENT_SECONDS: Final = 900.0  # after which a reader counts as stuck; a store may be silent for 360
_FORK: Final = multiprocessing.get_context("fork")
_task: Task  # of a reader process


@dataclass(frozen=True, slots=True)
class Reading:
    """A batch requested from the readers. indices: the samples' numbers. answer: the batch, pickled."""

    indices: Sequence[int]
    answer: Future[bytes]

    def cancel(self) -> None:
        self.answer.cancel()


class Readers:
    """A pool of processes that read a dataset. If one of them ends, a new pool reads the batches that are missing.

    Only the thread that runs torch operations may call `submit` and `result`, which fork processes: if another thread
    forked, a lock that the torch thread holds at that moment would stay locked in the child.
    """

    def __init__(self, task: Task, wanted: Prefetched) -> None:
        self._task, self._wanted = task, wanted
        self._pool: ProcessPoolExecutor | None = None

    def submit(self, indices: Sequence[int]) -> Reading:
        """Request a batch of these samples. Raises TaskError if no process can be started."""
        try:
            if self._pool is None:
                self._pool = ProcessPoolExecutor(self._wanted.readers, _FORK, _begin, (os.getpid(), self._task))
            return Reading(indices, self._pool.submit(_read, list(indices)))
        except BrokenProcessPool:
            self._pool = None
            return self.submit(indices)
        except OSError as error:
            raise TaskError(f"no process that reads the dataset can be started: {said_by(error)}") from None

    def result(self, reading: Reading) -> Batch:
        """Wait for and return a batch; request it again if a reader is killed. Raises TaskError, TaskOutOfMemory."""
        shown = list(reading.indices)[:8]
        for _ in range(MOST_ENDS):
            try:
                batch: Batch = pickle.loads(reading.answer.result(SILENT_SECONDS))
            except TimeoutError:
                raise TaskError(
                    f"the dataset, asked for samples {shown}, has not answered within {SILENT_SECONDS:g} s: "
                    "its reader process is stuck"
                ) from None
            except BrokenProcessPool:
                logger.warning("a process that reads the dataset was killed; another one reads its samples")
                reading = self.submit(reading.indices)
            else:
                return batch
        raise TaskError(
            f"the dataset, asked for samples {shown}, cannot be read: {MOST_ENDS} reader processes were killed "
            "(by lack of memory, or in a library's code?)"
        )

    def close(self) -> None:
        """End the readers, even busy ones."""
        if self._pool is not None:
            children = list((self._pool._processes or {}).values())
            self._pool.shutdown(wait=False, cancel_futures=True)
            for child in children:
                child.kill()
            for child in children:
                child.join()


def _begin(parent: int, task: Task) -> None:
    """Prepare a reader process, which has just been forked."""
    global _task
    _task = task
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the worker, which may have time left
    end_with(parent)
    _let_go_of_connections()
    gc.freeze()  # existing objects stay, and their pages stay shared with the worker


def _read(indices: Sequence[int]) -> bytes:
    """Return a batch, pickled, with tensors copied: a view would be pickled with all the memory that it views."""
    batch = [tuple(map(_copy, parts)) for parts in load_batch(_task, indices)]
    return pickle.dumps(tuple(batch), pickle.HIGHEST_PROTOCOL)


def _copy(part: torch.Tensor) -> torch.Tensor:
    return part.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _let_go_of_connections() -> None:
    """Close the worker's connections in this process, or they would outlive the worker. Their descriptors then refer to
    /dev/null, because the worker's objects, copied into this process, may still close them.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            if int(name) > 2 and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.dup2(nothing, int(name))


MOST_AHEAD = 4  # times the batches that a stage prefetches; the oldest, unused since a change of plan, go first
MOST_AT_ONCE: Final = 16  # batches that the thread reads when it is woken, if they are small:
AT_ONCE_BYTES: Final = 1 << 20

Key = tuple[int, int, int]  # stage, step, microbatch


class BatchReader:
    """The reader of batches for all stages of a worker; it prefetches if possible. One thread at a time calls the
    dataset, unless the dataset has reader processes.
    """

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
        """Return inputs and targets of a microbatch, shared with no other stage. Raises TaskError, TaskOutOfMemory."""
        expected = self._expected.pop((stage, step, microbatch), None)
        if expected:
            return self._result(expected)
        before = torch.get_rng_state() if self._draws is None else None
        batch = self._read(step, microbatch)
        if before is not None:
            self._draws = not torch.equal(before, torch.get_rng_state())
            self._at_once = max(1, min(MOST_AT_ONCE, AT_ONCE_BYTES // max(1, _size(batch))))
        return batch

    def expect(self, stage: int, coming: Iterable[tuple[int, int]]) -> None:
        """Prefetch the next batches that the stage will request, once the first batch has shown that this is possible.

        coming: (step, microbatch) in the order of requests. Raises TaskError if no reader process can be started; other
        errors are raised when the batch is requested. Waking a thread takes longer than reading a small batch, so the
        thread reads several small batches at once.
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
        """Keep the background thread from calling the dataset in this context; reader processes continue."""
        with self._calling:
            yield

    def close(self) -> None:
        for future in self._expected.values():
            future.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._readers:
            self._readers.close()

    def _read_all(self, futures: "dict[Key, Future[Batch]]") -> None:
        """Read these batches one after the other, and set the result of each future as soon as it is known."""
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


def _size(batch: Batch) -> int:
    return sum(part.nbytes for parts in batch for part in parts)
