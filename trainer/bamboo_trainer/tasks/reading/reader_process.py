"""Processes that read a task's data, and their messages.

They are forked by one quiet process, which was itself forked from the worker at a moment when no thread of it held a
lock: what a thread holds while its process is forked (torch's generator, the allocator, a lock of the dataset's
library) stays locked in the child for ever. So a reader can be replaced at any time.

    worker  --control-->  template  --forks-->  readers        worker  --channel-->  each reader

Each ends with the process that has forked it, however that ends, and holds none of the worker's connections open.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import stat
import struct
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from bamboo_core.orphans import end_with
from bamboo_trainer.task import Parts
from bamboo_trainer.tasks.task_errors import TaskError, TaskOutOfMemory

Batch = tuple[Parts, Parts]  # inputs and targets
Read = Callable[[Sequence[int]], Batch]
START_SECONDS: Final = 60.0  # for one process to be started or ended
SILENT_SECONDS: Final = 900.0  # a reader that sends nothing for this long is given up; a store may be silent for 360
_LENGTH: Final = struct.Struct("<Q")
_NUMBER: Final = struct.Struct("<q")
_START: Final = 0  # the request to the template to start a reader, instead of the id of one to end


class ReaderTemplate:
    """The process that forks readers. Make it while no other thread holds a lock that a dataset may need, on a thread
    that then calls `wait`: the process ends with that thread. Raises OSError.
    """

    def __init__(self, read: Read) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        try:
            pid = os.fork()
            if pid == 0:
                _become(parent, theirs, lambda: _serve(theirs, read))
        except OSError:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()
        ours.settimeout(START_SECONDS)
        self._pid, self._control = pid, ours
        self._asking, self._ending = threading.Lock(), threading.Lock()
        self._reaped = False
        self.gone = False  # it cannot start readers any more

    def start(self) -> "ReaderProcess":
        """Start another reader. Raises OSError, EOFError if the template has ended."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                answer = self._ask(_START, [theirs.fileno()])
            if answer < 0:
                raise OSError(-answer, os.strerror(-answer))
        except (OSError, EOFError):
            ours.close()
            raise
        return ReaderProcess(self, answer, ours)

    def end(self, pid: int) -> str:
        """Kill and reap that reader; return how it had ended, in words."""
        try:
            code = self._ask(pid)
        except (OSError, EOFError):  # the readers end with the template
            return "has ended"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def wait(self) -> None:
        """Wait until the process has ended, and reap it."""
        with contextlib.suppress(ChildProcessError):  # others have reaped it
            os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        with self._ending:
            self.gone = self._reaped = True
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
        with self._asking:  # threads that ask get an end of file
            self._control.close()

    def close(self) -> None:
        """End the template, which kills and reaps its readers. May be called on any thread."""
        self.gone = True
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """Kill it with its readers, which the process that inherits them then reaps."""
        with self._ending:
            self.gone = True
            if not self._reaped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)

    def _ask(self, number: int, descriptors: Sequence[int] = ()) -> int:
        with self._asking:
            try:
                socket.send_fds(self._control, [_NUMBER.pack(number)], descriptors)
                if answer := self._control.recv(_NUMBER.size):
                    return int(_NUMBER.unpack(answer)[0])
            except TimeoutError:
                self.kill()  # a late answer would be taken for the answer to another request
                raise
            except OSError:
                self.gone = True
                raise
            self.gone = True
            raise EOFError


class ReaderProcess:
    """One reader, used and ended by one thread."""

    def __init__(self, template: ReaderTemplate, pid: int, channel: socket.socket) -> None:
        channel.settimeout(SILENT_SECONDS)
        self._template, self._pid, self._socket = template, pid, channel

    def read(self, indices: Sequence[int]) -> Batch:
        """Read a batch. Raises EOFError or OSError if the process has ended, TimeoutError after SILENT_SECONDS."""
        send(self._socket, json.dumps(list(indices)).encode())
        answer = json.loads(_receive(self._socket))
        if "error" in answer:
            raise (TaskOutOfMemory if answer["memory"] else TaskError)(answer["error"])
        inputs, targets = (tuple(_receive_tensor(self._socket, form) for form in forms) for forms in answer["parts"])
        return inputs, targets

    def end(self) -> str:
        """Kill and reap it; return how it had ended, in words."""
        self._socket.close()
        return self._template.end(self._pid)


def _become(parent: int, kept: socket.socket, work: Callable[[], None]) -> NoReturn:
    """Do the work in a process that has just been forked, until no requests come any more, then exit."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # they are for the worker, which may have time left
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        end_with(parent)
        _let_go_of_connections(kept.fileno())
        work()
        os._exit(0)
    except (EOFError, OSError):
        os._exit(0)  # the requesting process has ended, or wants no more
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _serve(control: socket.socket, read: Read) -> None:
    """Start and end readers, in the template, and end all of them when no requests come any more."""
    gc.freeze()  # existing objects stay, and their pages stay shared with the worker
    readers: set[int] = set()
    try:
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, _NUMBER.size, 1)
            if not message:
                break
            (asked,) = _NUMBER.unpack(message)
            if asked == _START:
                answer = _start_reader(descriptors[0], read)
                if answer > 0:
                    readers.add(answer)
            else:
                readers.remove(asked)
                answer = _ended(asked)
            control.send(_NUMBER.pack(answer))
    finally:
        for pid in readers:
            os.kill(pid, signal.SIGKILL)
        for pid in readers:
            os.waitpid(pid, 0)


def _start_reader(descriptor: int, read: Read) -> int:
    """Return the process id of a new reader, or the number of the error, negative."""
    template = os.getpid()
    with socket.socket(fileno=descriptor) as channel:
        try:
            pid = os.fork()
        except OSError as error:
            return -(error.errno or 1)
        if pid == 0:
            _become(template, channel, lambda: _answer_all(channel, read))
        return pid


def _ended(pid: int) -> int:
    """End a process; return its exit code, negative for a signal."""
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _answer_all(channel: socket.socket, read: Read) -> None:
    while True:
        _answer(channel, json.loads(_receive(channel)), read)


def _answer(channel: socket.socket, indices: Sequence[int], read: Read) -> None:
    try:
        batch = read(indices)
        tensors = [[_plain(part) for part in parts] for parts in batch]
    except (TaskError, TaskOutOfMemory) as error:
        traceback.print_exc()
        answer = {"error": str(error), "memory": isinstance(error, TaskOutOfMemory)}
        send(channel, json.dumps(answer).encode())
        return
    forms = [[[str(p.dtype).removeprefix("torch."), list(p.shape)] for p in parts] for parts in tensors]
    send(channel, json.dumps({"parts": forms}).encode())
    for part in (part for parts in tensors for part in parts):
        channel.sendall(_bytes(part))


def _plain(part: Tensor) -> Tensor:
    """Return the tensor in host memory, contiguous."""
    if part.layout is not torch.strided:
        raise TaskError(f"the dataset returned a tensor of layout {part.layout}, expected torch.strided")
    return part.detach().cpu().contiguous()


def _bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _receive_tensor(channel: socket.socket, form: Sequence[Any]) -> Tensor:
    name, shape = form
    tensor = torch.empty(shape, dtype=getattr(torch, name))
    if tensor.numel():
        _fill(channel, _bytes(tensor))
    return tensor


def send(channel: socket.socket, data: bytes) -> None:
    channel.sendall(_LENGTH.pack(len(data)) + data)


def _receive(channel: socket.socket) -> bytearray:
    head = bytearray(_LENGTH.size)
    _fill(channel, memoryview(head))
    data = bytearray(_LENGTH.unpack(head)[0])
    _fill(channel, memoryview(data))
    return data


def _fill(channel: socket.socket, view: memoryview) -> None:
    """Fill the view. Raises EOFError if the other end is gone, TimeoutError after the socket's limit."""
    while view.nbytes:
        got = channel.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]


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
