"""A worker's devices, GPUs or the CPU: their choice, torch's settings, copies of layers, marks in GPU streams."""

import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from weakref import finalize

import torch
from torch import Tensor, nn

from bamboo_core.job.pod_templates import asking_for_gpus
from bamboo_core.job.spec import JobSpec
from bamboo_core.names import ENV_DEVICE

CPU: Final = torch.device("cpu")


class DeviceError(ValueError):
    """Error because a worker cannot use the requested device; the text is a sentence for the user."""


def choose_device(worker: str) -> torch.device:
    """Return the device in BAMBOO_DEVICE ("cpu", "cuda", "cuda:1"), else a GPU if there is one, else the CPU.

    Unless BAMBOO_DEVICE names one GPU, the last number in the worker's name chooses the GPU. Raises DeviceError.
    """
    wanted = os.environ.get(ENV_DEVICE) or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise DeviceError(f'{ENV_DEVICE}: expected "cpu", "cuda" or "cuda:<number>", got {wanted!r}') from error
    if device.type == "cpu":
        return device
    if device.type != "cuda" or not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"{ENV_DEVICE}: there is no device {wanted!r} here")
    if device.index is None:
        device = torch.device("cuda", _number(worker) % torch.cuda.device_count())
    return device


def choose_devices(worker: str, count: int) -> tuple[torch.device, ...]:
    """Return the devices for `count` device stages of a worker: adjacent GPUs, or the CPU for each of them.

    BAMBOO_DEVICE may name the first one; else the last number in the worker's name chooses it. Raises DeviceError.
    """
    first = choose_device(worker)
    if count == 1 or first.type == "cpu":
        return (first,) * count
    available = torch.cuda.device_count()
    index = first.index
    if os.environ.get(ENV_DEVICE) in (None, "", "cuda"):  # divide the GPUs among workers, `count` for each
        index = _number(worker) % max(1, available // count) * count
    if index + count > available:
        raise DeviceError(
            f"spec.worker.devices: expected at most the {available - index} GPUs that are here, got {count}"
        )
    devices = tuple(torch.device("cuda", index + i) for i in range(count))
    names = sorted({torch.cuda.get_device_name(device) for device in devices})
    if len(names) > 1:
        raise DeviceError(f"spec.worker.devices: expected GPUs of one model for a worker, got {', '.join(names)}")
    return devices


def require_gpus(spec: JobSpec, devices: Sequence[torch.device]) -> None:
    """Raise DeviceError if a job asks for GPUs for all workers, but this one would use the CPU. For workers in pods.

    devices: the worker's devices. BAMBOO_DEVICE=cpu permits the CPU.
    """
    asks = asking_for_gpus(spec)
    if asks and devices[0].type == "cpu" and not os.environ.get(ENV_DEVICE):
        built = "" if torch.version.cuda or torch.version.hip else f", and torch {torch.__version__} is built for CPUs"
        raise DeviceError(
            f"{asks} for GPUs, and there is none in this container{built}; expected a GPU, or "
            f"{ENV_DEVICE}=cpu to train on the CPU"
        )


def _number(worker: str) -> int:
    return int(re.findall(r"\d+", worker)[-1]) if re.search(r"\d", worker) else 0


def use(device: torch.device, *, deterministic: bool = True) -> None:
    """Make a GPU this thread's current device. Do nothing for a CPU, whose results on one thread are always the same.

    deterministic: use torch's deterministic algorithms where it has them; if False, cuDNN benchmarks its kernels and
    takes the fastest.
    """
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = not deterministic
    if not deterministic:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no code reads uninitialized memory


def wait_for(device: torch.device) -> None:
    """Wait until the device's computing stream has done all work started so far. For a CPU, do nothing."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def release_cached() -> None:
    """Release torch's caches of GPU and pinned host memory, so that blocks of other sizes fit."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
        torch.accelerator.empty_host_cache()


def apart_from_others(
    layers: Mapping[int, nn.Module], device: torch.device, *, rounds: bool = False
) -> dict[int, nn.Module]:
    """Return the layers, with copies in place of layers that have buffers or frozen parameters on another GPU.

    `Module.to` would move these away from that GPU. rounds: frozen parameters will change their dtype, so each layer
    with frozen parameters is copied. Copies share tensors and modules with each other as their originals do; trained
    parameters are never copied.
    """
    memo: dict[int, object] = {}
    apart = {}
    for number, layer in layers.items():
        parameters = list(layer.parameters())
        frozen = [one for one in parameters if not one.requires_grad]
        constants = [*frozen, *layer.buffers()]
        apart[number] = layer
        if (rounds and frozen) or any(one.device not in (CPU, device) for one in constants):
            memo |= {id(one): one for one in parameters if one.requires_grad}
            with torch.no_grad():
                memo |= {id(one): _moved(one, device) for one in constants if id(one) not in memo}
            apart[number] = deepcopy(layer, memo)
    return apart


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    moved = tensor.to(device)
    return nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory. A GPU's tensor is copied into pinned memory, asynchronously, in stream order."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=tensor.is_cuda)


END_SECONDS: Final = 5.0  # limit for a GPU's work at the end of the process


class QueueMark(Protocol):
    """A mark in a device's queue of work, which the device passes when it has done all work before the mark."""

    def done(self) -> bool:
        """Return whether the device has passed the mark."""
        ...

    def since(self, earlier: Any) -> float:
        """Return the seconds from an earlier mark of the same device to this one. Both must be done."""
        ...


@dataclass(frozen=True, slots=True)
class PassedMark:
    """A mark that its device has passed already, as on a CPU. at: monotonic time in seconds."""

    at: float = field(default_factory=time.monotonic)

    def done(self) -> bool:
        return True

    def since(self, earlier: "PassedMark") -> float:
        return self.at - earlier.at


@dataclass(frozen=True, slots=True)
class EventMark:
    """A mark in a GPU's stream."""

    event: torch.cuda.Event

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def since(self, earlier: "EventMark") -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1000


class EventWatch:
    """A thread that calls `notify` after each event of a GPU, in the order in which the events were added.

    It ends after the watch is deleted. Process exit waits up to END_SECONDS: a thread in torch could abort the process.
    """

    def __init__(self, name: str, notify: Callable[[], None]) -> None:
        self._events: queue.SimpleQueue[torch.cuda.Event | None] = queue.SimpleQueue()
        ended = threading.Event()
        thread = threading.Thread(target=_notify_of, args=(self._events, notify, ended), name=name, daemon=True)
        finalize(thread, ended.wait, END_SECONDS)  # finalizers run last registered, first called
        finalize(self, self._events.put, None)
        thread.start()

    def add(self, event: torch.cuda.Event) -> None:
        self._events.put(event)


def _notify_of(
    events: "queue.SimpleQueue[torch.cuda.Event | None]", notify: Callable[[], None], ended: threading.Event
) -> None:
    try:
        while (event := events.get()) is not None:
            event.synchronize()
            notify()
    finally:
        ended.set()


def event_mark(device: torch.device) -> EventMark:
    """Return a mark behind the work queued so far on the device's computing stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return EventMark(event)
