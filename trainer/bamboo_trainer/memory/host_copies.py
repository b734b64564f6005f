"""Copies between a device and host memory, from where tensors are sent, and between the devices of one worker: the
engine does not wait for them.

On a CPU a tensor is its own copy. On a GPU copies have streams of their own and pinned memory, so that they are made
while instructions run. Whoever started a copy to host memory asks now and then whether it is there; what is brought to
the device is waited for by the device alone. What one device gives another takes the driver's direct way: over NVLink
or PCIe where devices reach each other's memory, else as the driver stages it.
"""

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from bamboo_trainer.memory.marks import EventWatch, PassedMark, QueueMark, event_mark
from bamboo_trainer.memory.placement import wait_for
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

    def hand_over(self, tensors: Iterable[Tensor]) -> Parts:
        """These tensors, for who brings them to any device of this worker: they are as what has been started so far
        makes them, and nobody may write to them any more.
        """
        ...

    def mark(self) -> QueueMark:
        """A mark behind what the device has been given to compute."""
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

    def hand_over(self, tensors: Iterable[Tensor]) -> Parts:
        return tuple(tensors)

    def mark(self) -> QueueMark:
        wait_for(self._device)
        return PassedMark()

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


class _All:
    """A copy of the tensors of several devices. places: where each tensor is, in which of the copies."""

    def __init__(self, copies: Sequence[Copy], places: Sequence[int]) -> None:
        self._copies, self._places = copies, places

    def ready(self) -> bool:
        return all(copy.ready() for copy in self._copies)

    def wait(self) -> Parts:
        parts = [iter(copy.wait()) for copy in self._copies]
        return tuple(next(parts[place]) for place in self._places)


def pinned_size(size: int) -> int:
    """What torch takes of pinned memory for so many bytes: its allocator makes blocks of powers of two."""
    return 1 << (size - 1).bit_length() if size else 0


class HandedOver:
    """The events after which tensors that devices of this worker have handed over are made."""

    def __init__(self) -> None:
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def add(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Record that what has been started on the device so far makes these tensors of it."""
        made = torch.cuda.Event()  # type: ignore[no-untyped-call]
        made.record(torch.cuda.current_stream(device))
        for tensor in tensors:
            self._made[tensor] = made

    def wait(self, stream: torch.cuda.Stream, tensor: Tensor) -> None:
        """Let a stream wait until the tensor is made, and for nothing that its device was given after it."""
        stream.wait_event(self._made[tensor])


class CudaCopies:
    """The copies between a GPU and host memory, and to it from other GPUs. told: called when a copy is ready, by a
    thread of its own, so that the engine need not ask all the time. handed_over: what all devices of the worker have.
    """

    def __init__(
        self,
        device: torch.device,
        told: Callable[[], None],
        pinned_bytes: int = PINNED_BYTES,
        handed_over: HandedOver | None = None,
    ) -> None:
        self._device, self._room = device, pinned_bytes
        self._handed_over = handed_over or HandedOver()
        self._inward, self._urgent, self._bulk = (torch.cuda.Stream(device) for _ in range(3))  # type: ignore[no-untyped-call]
        self._across: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}  # there and here, by device
        self._watch = EventWatch("host-copies", told)
        self._lock = threading.Lock()  # over the room: tensors are freed by any thread

    def start(self, tensors: Iterable[Tensor], *, bulk: bool = False) -> Copy:
        tensors, stream = tuple(tensors), self._bulk if bulk else self._urgent
        if not tensors or all(tensor.is_cpu for tensor in tensors):
            return _There(tensors)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            parts = tuple(tensor if tensor.is_cpu else self._copy(tensor.detach(), stream) for tensor in tensors)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        self._watch.add(event)
        return _UnderWay(parts, event)

    def _copy(self, tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
        copy = self.buffer(tensor.shape, tensor.dtype)
        copy.copy_(tensor, non_blocking=copy.is_pinned())
        tensor.record_stream(stream)
        return copy

    def bring(self, tensors: Iterable[Tensor]) -> Parts:
        tensors = tuple(tensors)
        others = tuple(tensor for tensor in tensors if tensor.device != self._device)
        if not others:
            return tensors
        here = {id(tensor): tensor for tensor in tensors}
        for device in dict.fromkeys(tensor.device for tensor in others):
            mine = [tensor for tensor in others if tensor.device == device]
            brought = self._bring_from_host(mine) if device == CPU else self._bring_across(device, mine)
            here |= zip(map(id, mine), brought, strict=True)
        return tuple(here[id(tensor)] for tensor in tensors)

    def _bring_from_host(self, tensors: Sequence[Tensor]) -> Parts:
        with torch.cuda.stream(self._inward):
            there = tuple(tensor.to(self._device, non_blocking=True) for tensor in tensors)
        return self._after(self._inward, there)

    def _bring_across(self, device: torch.device, tensors: Sequence[Tensor]) -> Parts:
        """Copies from another device. torch makes them on the stream of the device that has them, with peer access
        where there is any, and lets the stream of this one wait for them. Both are streams of their own, so that they
        wait for the tensors alone, and not for what either device computes meanwhile.
        """
        if device not in self._across:
            self._across[device] = (torch.cuda.Stream(device), torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        there, here = self._across[device]
        for tensor in tensors:
            self._handed_over.wait(there, tensor)
        with torch.cuda.stream(there), torch.cuda.stream(here):
            brought = tuple(tensor.to(self._device, non_blocking=True) for tensor in tensors)
        for tensor in tensors:
            tensor.record_stream(there)
        return self._after(here, brought)

    def _after(self, stream: torch.cuda.Stream, brought: Parts) -> Parts:
        """What a stream has brought, for the one that computes."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(stream)
        for tensor in brought:
            tensor.record_stream(current)
        return brought

    def hand_over(self, tensors: Iterable[Tensor]) -> Parts:
        tensors = tuple(tensor.detach() for tensor in tensors)
        self._handed_over.add((tensor for tensor in tensors if tensor.device == self._device), self._device)
        return tensors

    def mark(self) -> QueueMark:
        return event_mark(self._device)

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


class CopiesOfDevices:
    """The copies for tensors of several devices, each with its own streams. What is brought goes to the first device; a
    device stage has the copies of its own.
    """

    def __init__(self, by_device: Mapping[torch.device, HostCopies]) -> None:
        self._by_device = dict(by_device)
        self._first = next(iter(self._by_device.values()))

    def start(self, tensors: Iterable[Tensor], *, bulk: bool = False) -> Copy:
        tensors = tuple(tensors)
        found = list(dict.fromkeys(t.device for t in tensors if t.device in self._by_device))
        if len(found) < 2:
            return self._of(tensors).start(tensors, bulk=bulk)
        places = [found.index(t.device) if t.device in found else 0 for t in tensors]
        copies = []
        for number, device in enumerate(found):
            mine = [tensor for tensor, place in zip(tensors, places, strict=True) if place == number]
            copies.append(self._by_device[device].start(mine, bulk=bulk))
        return _All(copies, places)

    def bring(self, tensors: Iterable[Tensor]) -> Parts:
        return self._first.bring(tensors)

    def hand_over(self, tensors: Iterable[Tensor]) -> Parts:
        """They are all of one device, but for those in host memory: a device stage has made them."""
        tensors = tuple(tensors)
        return self._of(tensors).hand_over(tensors)

    def mark(self) -> QueueMark:
        return self._first.mark()

    def _of(self, tensors: Parts) -> HostCopies:
        """The copies of the device that some of these tensors are on."""
        return next((self._by_device[t.device] for t in tensors if t.device in self._by_device), self._first)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._first.buffer(shape, dtype)


def host_copies(
    device: torch.device,
    told: Callable[[], None],
    pinned_bytes: int = PINNED_BYTES,
    handed_over: HandedOver | None = None,
) -> HostCopies:
    """The copies for that device."""
    return CudaCopies(device, told, pinned_bytes, handed_over) if device.type == "cuda" else AtOnce(device)


def copies_by_device(devices: Iterable[torch.device], told: Callable[[], None]) -> dict[torch.device, HostCopies]:
    """The copies for each of these devices, which share the pinned memory and what is handed over."""
    each, handed_over = tuple(dict.fromkeys(devices)), HandedOver()
    return {device: host_copies(device, told, PINNED_BYTES // len(each), handed_over) for device in each}


def together(by_device: Mapping[torch.device, HostCopies]) -> HostCopies:
    """The copies for tensors of any of these devices."""
    return next(iter(by_device.values())) if len(by_device) == 1 else CopiesOfDevices(by_device)
