"""Reading of the task's data by step and microbatch, in the background while the worker computes.

There is no reading ahead if the dataset draws from torch's generator: the background would draw from the one that
layers draw from. The first batch, read in the foreground, shows whether it does.

A `Prefetched` dataset has several processes that read (`Readers`). A reader holds nothing that matters: it may be
killed, and another one reads its batch. Each ends with the worker, however that ends, and holds none of the worker's
connections open.
"""

import contextlib
import gc
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import stat
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.connection import Connection
from typing import Final

import torch

from bamboo_core.complaints import said_by
from bamboo_core.orphans import end_with
from bamboo_trainer.data.datasets import Prefetched, readers_of
from bamboo_trainer.task import Dataset, Parts, Task
from bamboo_trainer.tasks.task_errors import TaskError, TaskOutOfMemory
from bamboo_trainer.tasks.user_code import load_batch

logger = logging.getLogger(__name__)

Batch = tuple[Parts, Parts]  # inputs and targets
Read = Callable[[Sequence[int]], Batch]
MOST_ENDS: Final = 3  # of reader processes over one batch
SILENT_SECONDS: Final = 900.0  # a reader that sends nothing for this long is given up; a store may be silent for 360
REPLACE_SECONDS: Final = 0.1  # a killed reader is missing this long while a batch is waited for
_FORK: Final = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class Reading:
    """A batch that a reader was asked for. answer: the batch, or how the reader has ended."""

    indices: Sequence[int]
    answer: Future[Batch | str]

    def cancel(self) -> None:
        self.answer.cancel()


class Readers:
    """The readers of a dataset, as many as it wants. They start with the first submitted batch.

    Only the thread that runs torch operations may call `submit` and `result`: processes are forked in these calls
    alone, because a lock that this thread holds meanwhile would stay locked in the child.
    """

    def __init__(self, task: Task, wanted: Prefetched) -> None:
        self._read: Read = lambda indices: load_batch(task, indices)
        self._wanted = wanted.readers
        self._threads = ThreadPoolExecutor(wanted.readers, thread_name_prefix="data-reader")
        self._children: set[ReaderProcess] = set()
        self._idle: queue.SimpleQueue[ReaderProcess | None] = queue.SimpleQueue()  # None: the worker ends

    def submit(self, indices: Sequence[int]) -> Reading:
        """Ask for samples."""
        self._start_missing()
        return Reading(indices, self._threads.submit(self._ask, indices))

    def result(self, reading: Reading) -> Batch:
        """Return a submitted batch when it is ready. Raises TaskError, TaskOutOfMemory."""
        answer: Batch | str = ""
        for _ in range(MOST_ENDS):
            while not wait([reading.answer], REPLACE_SECONDS).done:
                self._start_missing()
            answer = reading.answer.result()
            if not isinstance(answer, str):
                return answer
            logger.warning("a process that reads the dataset %s; another one reads its samples", answer)
            reading = self.submit(reading.indices)
        raise TaskError(
            f"the dataset, asked for samples {list(reading.indices)[:8]}, cannot be read: its reader process {answer}, "
            f"and so did {MOST_ENDS - 1} others (of too little memory, or in a library's code?)"
        )

    def close(self) -> None:
        """End the readers, even busy ones."""
        for child in list(self._children):
            child.kill()  # a thread that waits for it ends it
        self._idle.put(None)
        self._threads.shutdown(cancel_futures=True)
        for child in list(self._children):
            child.end()

    def _start_missing(self) -> None:
        """Start a process for each reader that has ended. Raises TaskError."""
        while len(self._children) < self._wanted:
            try:
                child = ReaderProcess(self._read)
            except OSError as error:
                raise TaskError(f"no process that reads the dataset can be started: {said_by(error)}") from None
            self._children.add(child)
            self._idle.put(child)

    def _ask(self, indices: Sequence[int]) -> Batch | str:
        """Return the batch that an idle reader has read, or how the reader has ended."""
        child = self._idle.get()
        if child is None:
            self._idle.put(None)
            raise TaskError("the worker ends")
        try:
            batch = child.read(indices)
        except TimeoutError:
            self._end(child)
            raise TaskError(
                f"the dataset, asked for samples {list(indices)[:8]}, has not answered within {SILENT_SECONDS:g} s: "
                "its reader process is stuck"
            ) from None
        except (EOFError, OSError):
            return self._end(child)
        except (TaskError, TaskOutOfMemory):
            self._idle.put(child)
            raise
        self._idle.put(child)
        return batch

    def _end(self, child: "ReaderProcess") -> str:
        how = child.end()
        self._children.discard(child)
        return how


class ReaderProcess:
    """One reader, forked from this process and used by one thread at a time. Raises OSError."""

    def __init__(self, read: Read) -> None:
        self._pipe, theirs = _FORK.Pipe()
        with theirs:
            self._process = _FORK.Process(target=_serve, args=(os.getpid(), theirs, read), daemon=True)
            self._process.start()

    def read(self, indices: Sequence[int]) -> Batch:
        """Read a batch. Raises EOFError or OSError if the process has ended, TimeoutError after SILENT_SECONDS."""
        self._pipe.send(list(indices))
        if not self._pipe.poll(SILENT_SECONDS):
            raise TimeoutError
        found = pickle.loads(self._pipe.recv_bytes())
        if isinstance(found, Exception):
            raise found
        batch: Batch = found
        return batch

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> str:
        """Kill and reap it; return how it had ended, in words. For the thread that uses it, or after it."""
        self.kill()
        self._process.join()
        self._pipe.close()
        code = self._process.exitcode or 0
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _serve(parent: int, pipe: Connection, read: Read) -> None:
    """Read batches until no requests come any more, in a process that has just been forked."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the worker, which may have time left
    end_with(parent)
    _let_go_of_connections(pipe.fileno())
    gc.freeze()  # existing objects stay, and their pages stay shared with the worker
    with contextlib.suppress(EOFError, OSError):  # the worker has ended, or wants no more
        while True:
            pipe.send_bytes(pickle.dumps(_found(read, pipe.recv()), pickle.HIGHEST_PROTOCOL))


def _found(read: Read, indices: Sequence[int]) -> Batch | Exception:
    try:
        inputs, targets = read(indices)
    except (TaskError, TaskOutOfMemory) as error:
        traceback.print_exc()
        return type(error)(str(error))
    # copies, because with a view the whole of its memory would be sent
    return tuple(map(_copy, inputs)), tuple(map(_copy, targets))


def _copy(part: torch.Tensor) -> torch.Tensor:
    return part.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _let_go_of_connections(kept: int) -> None:
    """Close connections of the worker, which must end with it. Their descriptors stay taken, because the worker's
    objects, copied into this process, may still close them.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number <= 2 or number in (kept, nothing):
            continue
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            kind = os.fstat(number).st_mode
            if stat.S_ISSOCK(kind) or stat.S_ISFIFO(kind) or not stat.S_IFMT(kind):
                os.dup2(nothing, number)


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
            self._at_once = max(1, min(MOST_AT_ONCE, AT_ONCE_BYTES // max(1, _size(batch))))
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


def _size(batch: Batch) -> int:
    return sum(part.nbytes for parts in batch for part in parts)
