"""Several readers of a task's data at once: processes that are forked from this one, or threads.

A reader process holds nothing that matters: it may be killed, and another one reads its batch. It ends with the thread
that has forked it, whatever ends that (`PR_SET_PDEATHSIG`), and holds none of the worker's connections open.
"""

import contextlib
import ctypes
import gc
import json
import logging
import os
import queue
import signal
import socket
import stat
import struct
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from bamboo_trainer.data.prefetched import Prefetched
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.child import PR_SET_PDEATHSIG
from bamboo_trainer.tasks.task_errors import TaskError, TaskOutOfMemory
from bamboo_trainer.tasks.user_code import load_batch

logger = logging.getLogger(__name__)

Batch = tuple[Parts, Parts]  # inputs and targets
START_SECONDS: Final = 60.0
MOST_ENDS: Final = 3  # of reader processes over one batch
_LENGTH: Final = struct.Struct("<Q")


class Readers:
    """As many as the dataset wants. They start with the first batch that is submitted.

    Of processes, `submit` must be called first by a thread that holds no lock and runs no torch operation, since what
    other threads hold while a process is forked stays locked in it.
    """

    def __init__(self, task: Task, wanted: Prefetched) -> None:
        self._task, self._count, self._processes = task, wanted.readers, wanted.processes
        self._asked: queue.SimpleQueue[tuple[Sequence[int], Future[Batch]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._children: dict[int, _Child] = {}  # by their thread's number
        self._state = threading.Condition()
        self._reading, self._paused, self._closed = 0, 0, False

    def submit(self, indices: Sequence[int]) -> Future[Batch]:
        """The dataset's answer for these samples; TaskError or TaskOutOfMemory."""
        if not self._threads:
            self._start()
        future: Future[Batch] = Future()
        self._asked.put((indices, future))
        return future

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While no thread of this process reads."""
        with self._state:
            self._paused += 1
            self._state.wait_for(lambda: self._processes or not self._reading)
        try:
            yield
        finally:
            with self._state:
                self._paused -= 1
                self._state.notify_all()

    def close(self) -> None:
        """Ends the readers, whatever they are doing. Threads that are stuck end with the process."""
        with self._state:
            self._closed = True
            for child in self._children.values():
                child.kill()
            self._state.notify_all()
        for _ in self._threads:
            self._asked.put(None)
        if self._processes:
            for thread in self._threads:
                thread.join(START_SECONDS)

    def _start(self) -> None:
        started = [threading.Event() for _ in range(self._count)]
        for number, event in enumerate(started):
            name = f"data-reader-{number}"
            thread = threading.Thread(target=self._run, args=(number, event), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        for event in started:
            event.wait(START_SECONDS)

    def _run(self, number: int, started: threading.Event) -> None:
        read = self._read_in_child if self._processes else self._read_here
        if self._processes:
            with contextlib.suppress(OSError):  # it is tried again for the first batch, which tells
                self._child(number)
        started.set()
        while (asked := self._asked.get()) is not None:
            indices, future = asked
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(read(number, indices))
            except BaseException as error:
                future.set_exception(error)
        self._end(number)

    def _read_here(self, _: int, indices: Sequence[int]) -> Batch:
        with self._state:
            self._state.wait_for(lambda: not self._paused or self._closed)
            self._reading += 1
        try:
            return load_batch(self._task, indices)
        finally:
            with self._state:
                self._reading -= 1
                self._state.notify_all()

    def _read_in_child(self, number: int, indices: Sequence[int]) -> Batch:
        how = ""
        for _ in range(MOST_ENDS):
            try:
                return self._child(number).read(indices)
            except (EOFError, OSError) as error:
                how = self._end(number) or f"cannot be started: {error}"
                if self._closed:
                    raise TaskError("the worker ends") from None
                logger.warning("a process that reads the dataset %s; another one reads its samples", how)
        raise TaskError(
            f"the dataset, asked for samples {list(indices)[:8]}, cannot be read: its reader process {how}, and so did "
            f"{MOST_ENDS - 1} others (of too little memory, or in a library's code?)"
        )

    def _end(self, number: int) -> str:
        """How that thread's process has ended; "" if it has none."""
        with self._state:
            child = self._children.pop(number, None)
        return child.end() if child else ""

    def _child(self, number: int) -> "_Child":
        with self._state:
            if self._closed:
                raise TaskError("the worker ends")
            if number not in self._children:
                self._children[number] = _Child(lambda indices: load_batch(self._task, indices))
            return self._children[number]


class _Child:
    """One reader process. Made, used and ended by one thread; any thread may kill it. Raises OSError."""

    def __init__(self, read: Callable[[Sequence[int]], Batch]) -> None:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        try:
            pid = os.fork()
            if pid == 0:
                _become_reader(parent, theirs, read)
        except OSError:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()
        self._pid, self._socket, self._ended = pid, ours, False
        self._lock = threading.Lock()

    def read(self, indices: Sequence[int]) -> Batch:
        """EOFError or OSError if the process has ended."""
        _send(self._socket, json.dumps(list(indices)).encode())
        answer = json.loads(_receive(self._socket))
        if "error" in answer:
            raise (TaskOutOfMemory if answer["memory"] else TaskError)(answer["error"])
        inputs, targets = (tuple(_receive_tensor(self._socket, form) for form in forms) for forms in answer["parts"])
        return inputs, targets

    def kill(self) -> None:
        with self._lock:
            if not self._ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)

    def end(self) -> str:
        """Kills and reaps it; how it had ended, in words."""
        self._socket.close()
        self.kill()
        with self._lock:
            if self._ended:
                return "has ended"
            self._ended = True
            try:
                code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            except ChildProcessError:  # others have reaped it
                return "has ended"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _become_reader(parent: int, channel: socket.socket, read: Callable[[Sequence[int]], Batch]) -> NoReturn:
    """In the forked process: answers until nobody asks any more."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # they are for the worker, which may have time left
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        _let_go_of_connections(channel.fileno())
        gc.freeze()  # what is here stays, and its pages stay shared with the worker
        while True:
            _answer(channel, json.loads(_receive(channel)), read)
    except (EOFError, OSError):
        os._exit(0)  # the worker has ended, or wants no more
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _answer(channel: socket.socket, indices: Sequence[int], read: Callable[[Sequence[int]], Batch]) -> None:
    try:
        batch = read(indices)
        tensors = [[_plain(part) for part in parts] for parts in batch]
    except (TaskError, TaskOutOfMemory) as error:
        traceback.print_exc()
        told = {"error": str(error), "memory": isinstance(error, TaskOutOfMemory)}
        _send(channel, json.dumps(told).encode())
        return
    forms = [[[str(p.dtype).removeprefix("torch."), list(p.shape)] for p in parts] for parts in tensors]
    _send(channel, json.dumps({"parts": forms}).encode())
    for part in (part for parts in tensors for part in parts):
        channel.sendall(_bytes(part))


def _plain(part: Tensor) -> Tensor:
    """In host memory, one element after the other."""
    if part.layout is not torch.strided:
        raise TaskError(f"the dataset returned a tensor of layout {part.layout}, expected torch.strided")
    return part.detach().cpu().contiguous()


def _bytes(tensor: Tensor) -> memoryview:
    """Of a contiguous tensor in host memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _receive_tensor(channel: socket.socket, form: Sequence[Any]) -> Tensor:
    name, shape = form
    tensor = torch.empty(shape, dtype=getattr(torch, name))
    if tensor.numel():
        _fill(channel, _bytes(tensor))
    return tensor


def _send(channel: socket.socket, data: bytes) -> None:
    channel.sendall(_LENGTH.pack(len(data)) + data)


def _receive(channel: socket.socket) -> bytearray:
    head = bytearray(_LENGTH.size)
    _fill(channel, memoryview(head))
    data = bytearray(_LENGTH.unpack(head)[0])
    _fill(channel, memoryview(data))
    return data


def _fill(channel: socket.socket, view: memoryview) -> None:
    """EOFError if the other end is gone."""
    while view.nbytes:
        got = channel.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]


def _let_go_of_connections(kept: int) -> None:
    """What a worker's peers hold the other end of must end with the worker. The descriptors stay taken: objects of the
    worker, which are here too, may still close them.
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
