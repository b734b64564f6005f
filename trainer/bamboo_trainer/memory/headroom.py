"""Headroom: a worker's memory use and how much more it could hold, so that it gets no layers without room."""

import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bamboo_core.control.memory import Memory
from bamboo_trainer.memory.cgroup import USABLE, HostMemory, host_memory

USED = Path("/proc/self/statm")  # in pages; the second number is resident memory


def headroom(
    devices: Sequence[torch.device], memory: Callable[[], HostMemory | None] = host_memory, used: Path = USED
) -> float | None:
    """Return the ratio of the usable to the used memory, of the scarcest: a GPU's, or a container's host memory.

    Memory that torch caches on a GPU counts as used. None if no limit is known. Safe in any thread.
    """
    known = [part for part in (*map(_on_gpu, devices), _on_host(memory(), used)) if part is not None]
    return min(known, default=None)


def has_room(device: torch.device, size: int) -> bool:
    """Return whether a device could hold `size` more bytes. torch's cache counts as free; on a CPU always true."""
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return size <= free + cached - (1 - USABLE) * total


def memory_of(devices: Sequence[torch.device], memory: Callable[[], HostMemory | None] = host_memory) -> Memory:
    """Return peak and limit of the GPU closest to its limit; without GPUs, of the host's memory.

    Memory that torch caches on a GPU counts. The host's limit is that of its control group, or else all of the
    machine's memory. Safe in any thread.
    """
    gpus = [
        Memory(peak=torch.cuda.max_memory_reserved(device), limit=torch.cuda.get_device_properties(device).total_memory)
        for device in devices
        if device.type == "cuda"
    ]
    if gpus:
        return max(gpus, key=lambda gpu: gpu.peak / gpu.limit)
    limits = [host.limit] if (host := memory()) is not None else []
    limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return Memory(peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, limit=min(limits))


def device_memory(devices: Sequence[torch.device], memory: Callable[[], HostMemory | None] = host_memory) -> int:
    """Return the bytes that stages may use on the smallest device; 0 if no limit is known."""
    limits = [torch.cuda.get_device_properties(device).total_memory for device in devices if device.type == "cuda"]
    if not limits and (host := memory()) is not None:
        limits = [host.limit]
    return int(USABLE * min(limits, default=0))


def _on_gpu(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return USABLE * total / max(1, total - free)


def _on_host(memory: HostMemory | None, used: Path) -> float | None:
    try:
        pages = used.read_text().split()[1]
    except (OSError, IndexError):
        return None
    if memory is None or not pages.isdecimal():
        return None
    return USABLE * memory.limit / max(1, int(pages) * os.sysconf("SC_PAGE_SIZE"))
