"""Asynchronous copies of tensors between devices, and between a device and host memory, from which frames are sent.

On a CPU a tensor is its own copy. On a GPU, copies have their own streams and, up to a limit, pinned memory, so that
they run alongside instructions. The engine can poll copies to host memory; the device waits for copies to it. Copies
between devices go over NVLink or PCIe if the devices reach each other's memory; else the driver stages them.
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

from bamboo_trainer.memory.gpus import CPU, EventWatch, PassedMark, QueueMark, event_mark, wait_for
from bamboo_trainer.transport.base import ordinary

PINNED_BYTES: Final = 4 << 30  # beyond it, copies use ordinary memory and the engine waits for them

Parts = tuple[Tensor, ...]
Bring = Callable[[Iterable[Tensor]], Parts]  # as `HostCopies.bring`


@dataclass(frozen=True, slots=True)
class Copied:
    """The event that an asynchronous copy to host memory is complete: frames that wait for it may be sent."""


class Copy(Protocol):
    """A copy of some tensors, perhaps still in progress."""

    def ready(self) -> bool: ...

    def wait(self) -> Parts:
        """Wait for the copies and return them. Until then no original may change. A host tensor is its own copy."""
        ...


class HostCopies(Protocol):
    """Copies between devices and host memory. Only the engine's thread may call the methods, except for `buffer`."""

    def start(self, tensors: Iterable[Tensor], *, bulk: bool = False) -> Copy:
        """Start to copy tensors to host memory. bulk: large and not urgent, so urgent copies may overtake it."""
        ...

    def bring(self, tensors: Iterable[Tensor]) -> Parts:
        """Return these tensors on the device, copied if they are elsewhere; work started from now on may use them."""
        ...

    def hand_over(self, tensors: Iterable[Tensor]) -> Parts:
        """Return these tensors for another stage of this worker, whose device brings them to itself (`bring`).

        They are complete once the work started so far is done; no code may write to them any more.
        """
        ...

    def mark(self) -> QueueMark:
        """Return a mark behind the work that the device has been given so far."""
        ...

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in host memory, for copies to or from the device. Safe in any thread."""
        ...


class _Made:
    """A copy that is complete once the GPU has passed an event, or at once if there is no event."""

    def __init__(self, parts: Parts, event: torch.cuda.Event | None = None) -> None:
        self._parts, self._event = parts, event

    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Parts:
        if self._event:
            self._event.synchronize()
        return self._parts


class AtOnce:
    """Synchronous copies. A tensor that is already in the right place is its own copy."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device

    def start(self, tensors: Iterable[Tensor], *, bulk: bool = False) -> Copy:
        return _Made(tuple([tensor if tensor.is_cpu else tensor.cpu() for tensor in tensors]))

    def bring(self, tensors: Iterable[Tensor]) -> Parts:
        return tuple([tensor.to(self._device) for tensor in tensors])

    def hand_over(self, tensors: Iterable[Tensor]) -> Parts:
        return tuple(tensors)

    def mark(self) -> QueueMark:
        wait_for(self._device)
        return PassedMark()

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return ordinary(shape, dtype)


class _All:
    """A copy of tensors from several devices. copies: one per device. places: each tensor's index in `copies`."""

    def __init__(self, copies: Sequence[Copy], places: Sequence[int]) -> None:
        self._copies, self._places = copies, places

    def ready(self) -> bool:
        return all(copy.ready() for copy in self._copies)

    def wait(self) -> Parts:
        parts = [iter(copy.wait()) for copy in self._copies]
        return tuple(next(parts[place]) for place in self._places)


def pinned_size(size: int) -> int:
    """Return the pinned memory that torch uses for `size` bytes: its allocator makes blocks of powers of two."""
    return 1 << (size - 1).bit_length() if size else 0


class HandedOver:
    """GPU events by tensor: a tensor that one device hands to another is complete after its event."""

    def __init__(self) -> None:
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def add(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Record that the work started on the device so far completes these tensors."""
        made = torch.cuda.Event()  # type: ignore[no-untyped-call]
        made.record(torch.cuda.current_stream(device))
        for tensor in tensors:
            self._made[tensor] = made

    def wait(self, stream: torch.cuda.Stream, tensor: Tensor) -> None:
        """Make a stream wait until a handed-over tensor is complete, but not for later work of the tensor's device."""
        stream.wait_event(self._made[tensor])


class CudaCopies:
    """Copies between a GPU and host memory, and from other GPUs.

    notify: called by another thread when a copy to host memory is ready, to wake an idle engine. handed_over: shared by
    all devices of the worker.
    """

    def __init__(
        self,
        device: torch.device,
        notify: Callable[[], None],
        pinned_bytes: int = PINNED_BYTES,
        handed_over: HandedOver | None = None,
    ) -> None:
        self._device, self._room = device, pinned_bytes
        self._handed_over = handed_over or HandedOver()
        self._inward, self._urgent, self._bulk = (torch.cuda.Stream(device) for _ in range(3))  # type: ignore[no-untyped-call]
        self._across: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}  # streams there, here
        self._watch = EventWatch("host-copies", notify)
        self._lock = threading.Lock()  # of the room, since any thread frees tensors

    def start(self, tensors: Iterable[Tensor], *, bulk: bool = False) -> Copy:
        tensors, stream = tuple(tensors), self._bulk if bulk else self._urgent
        if not tensors or all(tensor.is_cpu for tensor in tensors):
            return _Made(tensors)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            parts = tuple(tensor if tensor.is_cpu else self._copy(tensor.detach(), stream) for tensor in tensors)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        self._watch.add(event)
        return _Made(parts, event)

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
            copies = tuple(tensor.to(self._device, non_blocking=True) for tensor in tensors)
        return self._after(self._inward, copies)

    def _bring_across(self, device: torch.device, tensors: Sequence[Tensor]) -> Parts:
        """Return copies from another device.

        torch copies on a stream of the source device, with peer access if possible, and lets a stream of this device
        wait for it. Both streams serve only copies, so a copy waits for its tensor and for earlier copies, not for
        later work of either device.
        """
        if device not in self._across:
            self._across[device] = (torch.cuda.Stream(device), torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        source, here = self._across[device]
        for tensor in tensors:
            self._handed_over.wait(source, tensor)
        with torch.cuda.stream(source), torch.cuda.stream(here):
            brought = tuple(tensor.to(self._device, non_blocking=True) for tensor in tensors)
        for tensor in tensors:
            tensor.record_stream(source)
        return self._after(here, brought)

    def _after(self, stream: torch.cuda.Stream, brought: Parts) -> Parts:
        """Let the computing stream wait for the tensors that another stream copies, and return them."""
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
        """Return uninitialized host memory, pinned if it still fits in `pinned_bytes`."""
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
    """`HostCopies` for a worker with several devices: `start` and `hand_over` take tensors of any of the devices.

    `bring`, `mark` and `buffer` serve the first device only. Device stages use their device's `HostCopies` directly.
    """

    def __init__(self, by_device: Mapping[torch.device, HostCopies]) -> None:
        self._by_device = dict(by_device)
        self._first = next(iter(self._by_device.values()))

    def start(self, tensors: Iterable[Tensor], *, bulk: bool = False) -> Copy:
        tensors = tuple(tensors)
        devices = list(dict.fromkeys(t.device for t in tensors if t.device in self._by_device))
        if len(devices) < 2:
            return self._of(tensors).start(tensors, bulk=bulk)
        places = [devices.index(t.device) if t.device in devices else 0 for t in tensors]
        copies = []
        for number, device in enumerate(devices):
            mine = [tensor for tensor, place in zip(tensors, places, strict=True) if place == number]
            copies.append(self._by_device[device].start(mine, bulk=bulk))
        return _All(copies, places)

    def bring(self, tensors: Iterable[Tensor]) -> Parts:
        return self._first.bring(tensors)

    def hand_over(self, tensors: Iterable[Tensor]) -> Parts:
        """Hand over one device stage's tensors; all of them are on one device or in host memory."""
        tensors = tuple(tensors)
        return self._of(tensors).hand_over(tensors)

    def mark(self) -> QueueMark:
        return self._first.mark()

    def _of(self, tensors: Parts) -> HostCopies:
        """Return the `HostCopies` for the first of these tensors that is on a device, else the first device's."""
        return next((self._by_device[t.device] for t in tensors if t.device in self._by_device), self._first)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._first.buffer(shape, dtype)


def copies_by_device(devices: Iterable[torch.device], notify: Callable[[], None]) -> dict[torch.device, HostCopies]:
    """Create a `HostCopies` for each device. notify: called by another thread when a GPU's copy to the host is ready.

    The GPUs' copies get equal parts of PINNED_BYTES, and share the record of handed-over tensors.
    """
    each, handed_over = tuple(dict.fromkeys(devices)), HandedOver()
    room = PINNED_BYTES // len(each)
    return {one: CudaCopies(one, notify, room, handed_over) if one.type == "cuda" else AtOnce(one) for one in each}


def together(by_device: Mapping[torch.device, HostCopies]) -> HostCopies:
    """Return one `HostCopies` for tensors of any of these devices."""
    return next(iter(by_device.values())) if len(by_device) == 1 else CopiesOfDevices(by_device)
