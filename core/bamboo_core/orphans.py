"""Orphans, processes whose parent died first: adoption by a child subreaper, and termination. Linux only.

A task's processes may start others in sessions and groups of their own, and a killed parent's children get no signal.
But every process has a parent: an orphan is adopted by its nearest living ancestor that is a child subreaper. So a
process that must also end its children's descendants becomes a subreaper, and finds orphans among its own children.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable
from typing import Final

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
GRACE_SECONDS: Final = 1.0  # for orphans from SIGTERM to SIGKILL; trackers of shared memory use it to remove the memory


def adopt(*, adopts: bool = True) -> None:
    """Make this process the parent of orphaned descendants (child subreaper); with `adopts` False, stop that. Forked
    children do not inherit the setting.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


def end_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this newly forked process as soon as the thread that forked it ends. Exits at once if the
    parent has already ended. parent: the parent's process id. number: of the signal.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def children() -> dict[int, int]:
    """Return the process group of each child of this process, by process id, including zombies."""
    groups, own = {}, os.getpid()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:  # it may have ended
                parent, group = file.read().rpartition(b")")[2].split()[1:3]
                if int(parent) == own:
                    groups[int(entry)] = int(group)
    return groups


def carries(pid: int, variable: str, value: str) -> bool:
    """Return whether a process was started with this variable and value; False if it has ended or cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{variable}={value}".encode() in file.read().split(b"\0")
    except OSError:
        return False


class Orphans:
    """The processes that the caller ends, by SIGTERM and after GRACE_SECONDS by SIGKILL. Truthy while any remain."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def end(self, pids: Iterable[int], now: float) -> None:
        """Send SIGTERM to each process on the first call with it, and SIGKILL after GRACE_SECONDS. Call this again
        with the remaining processes until there are none. now: seconds of any clock.
        """
        self._since = {pid: self._since.get(pid, now) for pid in pids}
        for pid, since in self._since.items():
            late = now >= since + GRACE_SECONDS
            if late or since == now:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # ended, or of another user
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)

    def __bool__(self) -> bool:
        return bool(self._since)
