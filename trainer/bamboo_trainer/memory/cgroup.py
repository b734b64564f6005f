"""The host memory that this process may use: limits of its control groups, and their use.

The kernel kills a process that exceeds them. The limits are those of the group and of all visible groups above it; in a
container that is usually the container's own. Both versions of control groups are read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path("/sys/fs/cgroup")
GROUPS: Final = Path("/proc/self/cgroup")  # a line for each hierarchy: number:controllers:path; 0::path is version 2
UNLIMITED: Final = 2**60  # version 1 writes a number near 2**63 for no limit
USABLE: Final = 0.9  # share of the limit, since allocations between two checks need room, too


class HostMemory(NamedTuple):
    """The memory of a host, in bytes."""

    limit: int
    used: int  # without the file cache that the kernel can drop at once

    def has_room(self, more: int, freed: int = 0) -> bool:
        """Return whether `more` bytes fit, once `freed` bytes are free."""
        return self.used - freed + more <= USABLE * self.limit


class _Files(NamedTuple):
    """The names of one version's files."""

    limit: str
    used: str
    cache: str  # the line of memory.stat with reclaimable bytes


_VERSION_2: Final = _Files("memory.max", "memory.current", "inactive_file")
_VERSION_1: Final = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def host_memory(root: Path = ROOT, groups: Path = GROUPS) -> HostMemory | None:
    """Return the memory of the group with the least room; None if no limit is known. Safe in any thread."""
    known = [memory for folder, files in _folders(root, groups) if (memory := _read(folder, files)) is not None]
    return min(known, key=lambda memory: memory.limit - memory.used, default=None)


def _folders(root: Path, groups: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the folders of this process's groups and of those above; some do not exist inside a container."""
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
