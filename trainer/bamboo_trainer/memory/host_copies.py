"""Copies between a device and host memory, from where tensors are sent: the engine does not wait for them.

On a CPU a tensor is its own copy. On a GPU copies have streams of their own and pinned memory, so that they are made
while instructions run. Whoever started a copy to host memory asks now and then whether it is there; what is brought to
the device is waited for by the device alone.
"""

import math
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from bamboo_trainer.transport.base import ordinary

PINNED_BYTES: Final = 4 << 30  # beyond it copies go to ordinary memory, and the engine waits for them

CPU: Final = torch.device("cpu")

Parts = tuple[Tensor, ...]
Bring = Callable[[Iterable[Tensor]], Parts]  # as `HostCopies.bring`


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy that was under way is there: what waits for it may be sent."""


class Copy(Protocol):
    """A copy of some tensors."""

    def ready(self) -> bool: ...

    def wait(self) -> Parts:
        """The copies, once they are there. Their originals may not be written to before that."""
        ...


class HostCopies(Protocol):
    """Used by the engine's thread only, but for `buffer`."""

    def start(self, tensors: Iterable[Tensor], *, bulk: bool = False) -> Copy:
        """Starts to copy tensors to host memory. bulk: what is not urgent, and so large that what is may not be behind
        it.
        """
        ...

    def bring(self, tensors: Iterable[Tensor]) -> Parts:
        """Copies of these tensors on the device: what is started there from now on may use them."""
        ...

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory without values, for what will be brought to the device. Any thread may ask."""
        ...


class _There:
    """A copy that is made."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def ready(self) -> bool:
        return True

    def wait(self) -> Parts:
        return self._parts


class AtOnce:
    """The copies for tensors in host memory, which need none; all others are waited for."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device

    def start(self, tensors: Iterable[Tensor], *, bulk: bool = False) -> Copy:
        return _There(tuple([tensor if tensor.is_cpu else tensor.cpu() for tensor in tensors]))

    def bring(self, tensors: Iterable[Tensor]) -> Parts:
        return tuple([tensor.to(self._device) for tensor in tensors])

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return ordinary(shape, dtype)


class _UnderWay:
    def __init__(self, parts: Parts, event: torch.cuda.Event) -> None:
        self._parts, self._event = parts, event

    def ready(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Parts:
        self._event.synchronize()
        return self._parts


def pinned_size(size: int) -> int:
    """What torch takes of pinned memory for so many bytes: its allocator makes blocks of powers of two."""
    return 1 << (size - 1).bit_length() if size else 0


class CudaCopies:
    """The copies between a GPU and host memory. told: called when a copy is ready, by a thread of its own, so that the
    engine need not ask all the time.
    """

    def __init__(self, device: torch.device, told: Callable[[], None], pinned_bytes: int = PINNED_BYTES) -> None:
        self._device, self._told, self._room = device, told, pinned_bytes
        self._inward, self._urgent, self._bulk = (torch.cuda.Stream(device) for _ in range(3))  # type: ignore[no-untyped-call]
        self._events: queue.SimpleQueue[torch.cuda.Event] = queue.SimpleQueue()
        self._lock = threading.Lock()  # over the room: tensors are freed by any thread
        threading.Thread(target=self._watch, name="host-copies", daemon=True).start()

    def start(self, tensors: Iterable[Tensor], *, bulk: bool = False) -> Copy:
        tensors, stream = tuple(tensors), self._bulk if bulk else self._urgent
        if not tensors or all(tensor.is_cpu for tensor in tensors):
            return _There(tensors)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            parts = tuple(tensor if tensor.is_cpu else self._copy(tensor.detach(), stream) for tensor in tensors)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        self._events.put(event)
        return _UnderWay(parts, event)

    def _copy(self, tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
        copy = self.buffer(tensor.shape, tensor.dtype)
        copy.copy_(tensor, non_blocking=copy.is_pinned())
        tensor.record_stream(stream)
        return copy

    def bring(self, tensors: Iterable[Tensor]) -> Parts:
        tensors, current = tuple(tensors), torch.cuda.current_stream(self._device)
        if all(tensor.device == self._device for tensor in tensors):
            return tensors
        with torch.cuda.stream(self._inward):
            there = tuple(tensor.to(self._device, non_blocking=True) for tensor in tensors)
        current.wait_stream(self._inward)
        for tensor in there:
            tensor.record_stream(current)
        return there

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A buffer in pinned memory, as long as there is room there."""
        size = pinned_size(math.prod(shape) * dtype.itemsize)
        pinned = self._take(size)
        buffer = torch.empty(shape, dtype=dtype, pin_memory=pinned)
        if pinned:
            weakref.finalize(buffer, self._give, size)
        return buffer

    def _take(self, size: int) -> bool:
        with self._lock:
            fits = size <= self._room
            self._room -= size if fits else 0
            return fits

    def _give(self, size: int) -> None:
        with self._lock:
            self._room += size

    def _watch(self) -> None:
        while True:
            self._events.get().synchronize()
            self._told()


class CopiesOfDevices:
    """The copies for tensors of several devices, each with its own streams. What is brought goes to the first device; a
    device stage has the copies of its own.
    """

    def __init__(self, by_device: Mapping[torch.device, HostCopies]) -> None:
        self._by_device = dict(by_device)
        self._first = next(iter(self._by_device.values()))

    def start(self, tensors: Iterable[Tensor], *, bulk: bool = False) -> Copy:
        """Starts a copy of tensors that are all of one device, but for those in host memory."""
        tensors = tuple(tensors)
        copies = next((self._by_device[t.device] for t in tensors if t.device in self._by_device), self._first)
        return copies.start(tensors, bulk=bulk)

    def bring(self, tensors: Iterable[Tensor]) -> Parts:
        return self._first.bring(tensors)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._first.buffer(shape, dtype)


def host_copies(device: torch.device, told: Callable[[], None], pinned_bytes: int = PINNED_BYTES) -> HostCopies:
    """The copies for that device."""
    return CudaCopies(device, told, pinned_bytes) if device.type == "cuda" else AtOnce(device)


def copies_by_device(devices: Iterable[torch.device], told: Callable[[], None]) -> dict[torch.device, HostCopies]:
    """The copies for each of these devices, which share the pinned memory."""
    each = tuple(dict.fromkeys(devices))
    return {device: host_copies(device, told, PINNED_BYTES // len(each)) for device in each}


def together(by_device: Mapping[torch.device, HostCopies]) -> HostCopies:
    """The copies for tensors of any of these devices."""
    return next(iter(by_device.values())) if len(by_device) == 1 else CopiesOfDevices(by_device)
