"""The host memory that this process may use: what its control groups allow, and what is used of that.

A process that goes beyond is killed by the kernel. Limits are those of the group and of all above it that can be seen;
in a container that is usually the container's own. Both versions of control groups are read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path("/sys/fs/cgroup")
GROUPS: Final = Path("/proc/self/cgroup")  # a line for each hierarchy: number:controllers:path; 0::path is version 2
UNLIMITED: Final = 2**60  # version 1 writes a number near 2**63 for no limit
USABLE: Final = 0.9  # of the limit: what is allocated between two looks needs room, too


class HostMemory(NamedTuple):
    """The memory of a host, in bytes."""

    limit: int
    used: int  # without the file cache that the kernel would give up at once

    def has_room(self, more: int, freed: int = 0) -> bool:
        """Whether there is room for so many bytes more, once `freed` bytes are free."""
        return self.used - freed + more <= USABLE * self.limit


class _Files(NamedTuple):
    """How one version names things."""

    limit: str
    used: str
    cache: str  # the line of memory.stat with what can be given up


_VERSION_2: Final = _Files("memory.max", "memory.current", "inactive_file")
_VERSION_1: Final = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def host_memory(root: Path = ROOT, groups: Path = GROUPS) -> HostMemory | None:
    """The memory of the group that has least left; None if no limit is known. May be called in any thread."""
    found = [memory for folder, files in _folders(root, groups) if (memory := _read(folder, files)) is not None]
    return min(found, key=lambda memory: memory.limit - memory.used, default=None)


def _folders(root: Path, groups: Path) -> Iterator[tuple[Path, _Files]]:
    """The folders of this process's groups, and of those above. Some cannot be seen in a container, and lead
    nowhere.
    """
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
