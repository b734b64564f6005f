"""Memory limits: how much memory the host and the GPUs of a worker have, and how much of it is in use.

`host_memory` reads limit and use from control groups, of version 1 or 2: this process's group and all visible groups
above it, which in a container are usually the container's own. The kernel may kill processes of a group that exceeds
its limit.
"""

import os
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch

from bamboo_core.control.memory import Memory

ROOT: Final = Path("/sys/fs/cgroup")
GROUPS: Final = Path("/proc/self/cgroup")  # a line for each hierarchy: number:controllers:path; 0::path is version 2
UNLIMITED: Final = 2**60  # version 1 writes a number near 2**63 for no limit
USABLE: Final = 0.9  # share of the limit, since allocations between two checks need room, too


class HostMemory(NamedTuple):
    """The memory of a host or control group: limit and use, in bytes."""

    limit: int
    used: int  # without the file cache that the kernel can drop at once

    def has_room(self, more: int, freed: int = 0) -> bool:
        """Return whether `more` bytes fit into the usable part of the limit, once `freed` bytes are freed."""
        return self.used - freed + more <= USABLE * self.limit


class _Files(NamedTuple):
    """The names of a control group's memory files, in one version of control groups."""

    limit: str
    used: str
    cache: str  # the line of memory.stat with reclaimable bytes


_VERSION_2: Final = _Files("memory.max", "memory.current", "inactive_file")
_VERSION_1: Final = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def host_memory(root: Path = ROOT, groups: Path = GROUPS) -> HostMemory | None:
    """Return the memory of the control group with the least room; None if no limit is known. Safe in any thread."""
    known = [memory for folder, files in _folders(root, groups) if (memory := _read(folder, files)) is not None]
    return min(known, key=lambda memory: memory.limit - memory.used, default=None)


def _folders(root: Path, groups: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield (folder, file names) of this process's control groups and their parents. Some folders may not exist."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        lines = []
    yield root, _VERSION_2
    yield root / "memory", _VERSION_1
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        parts = [part for part in path.split("/") if part not in ("", "..")]
        if controllers == "":
            top, files = root, _VERSION_2
        elif "memory" in controllers.split(","):
            top, files = root / "memory", _VERSION_1
        else:
            continue
        for depth in range(1, len(parts) + 1):
            yield top.joinpath(*parts[:depth]), files


def _read(folder: Path, files: _Files) -> HostMemory | None:
    try:
        limit, used = ((folder / name).read_text().strip() for name in (files.limit, files.used))
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    if not limit.isdecimal() or not used.isdecimal() or int(limit) >= UNLIMITED:
        return None
    cached = [value for name, _, value in (line.partition(" ") for line in lines) if name == files.cache]
    reclaimable = int(cached[0]) if cached and cached[0].isdecimal() else 0
    return HostMemory(int(limit), max(0, int(used) - reclaimable))


def headroom(devices: Sequence[torch.device], memory: Callable[[], HostMemory | None] = host_memory) -> float | None:
    """Return the ratio of usable to used memory, the smallest among the GPUs and the host.

    Memory that torch caches on a GPU counts as used. None if no limit is known. Safe in any thread.
    """
    known = [part for part in (*map(_on_gpu, devices), _on_host(memory())) if part is not None]
    return min(known, default=None)


def has_room(device: torch.device, size: int) -> bool:
    """Return whether `size` more bytes fit into a device's usable memory, with torch's cache; True for a CPU."""
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return size <= free + cached - (1 - USABLE) * total


def memory_of(devices: Sequence[torch.device], memory: Callable[[], HostMemory | None] = host_memory) -> Memory:
    """Return this process's peak use and the limit, in bytes, of the fullest GPU or, without GPUs, of the host.

    Memory that torch caches on a GPU counts as used. The host's limit is the one from `memory`, but at most the
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
    """Return the bytes that stages may use on the smallest GPU or, without GPUs, the host; 0 if no limit is known."""
    limits = [torch.cuda.get_device_properties(device).total_memory for device in devices if device.type == "cuda"]
    if not limits and (host := memory()) is not None:
        limits = [host.limit]
    return int(USABLE * min(limits, default=0))


def _on_gpu(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return USABLE * total / max(1, total - free)


def _on_host(memory: HostMemory | None) -> float | None:
    return None if memory is None else USABLE * memory.limit / max(1, memory.used)
