"""Several processes that read a task's data at once.

A reader holds nothing that matters: it may be killed, and another one reads its batch. Each ends with the worker,
however that ends, and holds none of the worker's connections open.
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
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

import torch

from bamboo_core.complaints import said_by
from bamboo_core.orphans import end_with
from bamboo_trainer.data.prefetched import Prefetched
from bamboo_trainer.task import Parts, Task
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
