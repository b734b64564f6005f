"""The cgroups (version 1) of real nodes: for each node a group of the same name in every hierarchy."""

import time
from collections.abc import Iterator
from pathlib import Path

HIERARCHIES = Path("/sys/fs/cgroup")
FREEZER = HIERARCHIES / "freezer"
REMOVE_SECONDS, POLL_SECONDS = 20, 0.05


def are_there() -> bool:
    return (FREEZER / "cgroup.procs").exists()


def create(group: str) -> None:
    for hierarchy in HIERARCHIES.iterdir():
        if (hierarchy / "tasks").exists():  # version 2 may be mounted beside
            (hierarchy / group).mkdir()
            for file in ("cpuset.cpus", "cpuset.mems"):
                if (hierarchy / file).exists():
                    (hierarchy / group / file).write_text((hierarchy / file).read_text())


def enter(group: str, pid: int) -> None:
    """Put a process and its future descendants into the group, in the freezer hierarchy only."""
    (FREEZER / group / "cgroup.procs").write_text(str(pid))


def remove(group: str) -> None:
    """Remove a group from all hierarchies. Raises TimeoutError if its processes do not end within REMOVE_SECONDS."""
    end = time.monotonic() + REMOVE_SECONDS
    while left := [*_folders(group)]:
        for folder in left:
            try:
                folder.rmdir()
            except OSError:  # busy until its last process is gone
                if time.monotonic() > end:
                    raise TimeoutError(f"{folder} has processes after {REMOVE_SECONDS} s") from None
                time.sleep(POLL_SECONDS)
                break


def _folders(group: str) -> Iterator[Path]:
    """Yield a group's folders in all hierarchies, subfolders before the folder that contains them."""
    for top in HIERARCHIES.glob(f"*/{group}"):
        below = sorted((path for path in top.rglob("*") if path.is_dir()), key=lambda path: -len(path.parts))
        yield from (*below, top)
