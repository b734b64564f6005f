"""Copies of a device's tensors in host memory, from where they are sent: the engine does not wait for them.

On a CPU a tensor is its own copy. On a GPU the copy has a stream of its own and pinned memory, so that it is made while
the next instruction runs; whoever started it asks now and then whether it is there.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

PINNED_BYTES: Final = 4 << 30  # beyond it copies go to ordinary memory, and the engine waits for them

Parts = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy that was under way is there: what waits for it may be sent."""


class Copy(Protocol):
    """Of some tensors."""

    def ready(self) -> bool: ...

    def wait(self) -> Parts:
        """The copies, once they are there. Their originals may not be written to before that."""
        ...


class HostCopies(Protocol):
    """Used by the engine's thread only."""

    def start(self, tensors: Iterable[Tensor]) -> Copy: ...


class _There:
    """A copy that is made."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def ready(self) -> bool:
        return True

    def wait(self) -> Parts:
        return self._parts


class AtOnce:
    """Of tensors in host memory, which need none; all others are waited for."""

    def start(self, tensors: Iterable[Tensor]) -> Copy:
        return _There(tuple([tensor if tensor.is_cpu else tensor.cpu() for tensor in tensors]))


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
    """told: called when a copy is ready, by a thread of its own, so that the engine need not ask all the time."""

    def __init__(self, device: torch.device, told: Callable[[], None], pinned_bytes: int = PINNED_BYTES) -> None:
        self._device, self._told, self._room = device, told, pinned_bytes
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._events: queue.SimpleQueue[torch.cuda.Event] = queue.SimpleQueue()
        self._lock = threading.Lock()  # over the room: tensors are freed by any thread
        threading.Thread(target=self._watch, name="host-copies", daemon=True).start()

    def start(self, tensors: Iterable[Tensor]) -> Copy:
        tensors = tuple(tensors)
        if not tensors or all(tensor.is_cpu for tensor in tensors):
            return _There(tensors)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            parts = tuple(tensor if tensor.is_cpu else self._copy(tensor.detach()) for tensor in tensors)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._events.put(event)
        return _UnderWay(parts, event)

    def _copy(self, tensor: Tensor) -> Tensor:
        size = pinned_size(tensor.nbytes)
        pinned = self._take(size)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        if pinned:
            weakref.finalize(copy, self._give, size)
        copy.copy_(tensor, non_blocking=pinned)
        tensor.record_stream(self._stream)
        return copy

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


def host_copies(device: torch.device, told: Callable[[], None]) -> HostCopies:
    """Those for that device."""
    return CudaCopies(device, told) if device.type == "cuda" else AtOnce()
