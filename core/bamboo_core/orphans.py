"""Processes whose parent has died before them: who gets them, and how they are ended. Linux only.

What a task starts may start others, in sessions and groups of their own, and let go of them; and nothing tells the
processes of a killed parent. But each process has a parent, and that of an orphan is the nearest living ancestor that
adopts. So whoever is to end all descendants of its children adopts, and looks at its own children.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable
from typing import Final

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
GRACE_SECONDS: Final = 1.0  # for orphans from SIGTERM to SIGKILL: who tracks shared memory removes it in that time


def adopt(*, adopts: bool = True) -> None:
    """Have orphans among the descendants become this process's children, or no more. Forked children do not adopt."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


def end_with(parent: int) -> None:
    """In a child that has just been forked: be killed as soon as the parent's thread that has forked it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def children() -> dict[int, int]:
    """The process group of each child of this process, ended ones that are not reaped included."""
    found, own = {}, os.getpid()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:  # it may be gone by now
                parent, group = file.read().rpartition(b")")[2].split()[1:3]
                if int(parent) == own:
                    found[int(entry)] = int(group)
    return found


def carries(pid: int, variable: str, value: str) -> bool:
    """Was that process started with this value in its environment? Not if it has ended."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{variable}={value}".encode() in file.read().split(b"\0")
    except OSError:
        return False


class Orphans:
    """The processes that are being ended: by SIGTERM first, and GRACE_SECONDS later by SIGKILL."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def end(self, pids: Iterable[int], now: float) -> None:
        """Asks all of these processes to end, and kills those that have had their time. It is to be called again while
        there are any. now: seconds of any clock.
        """
        self._since = {pid: self._since.get(pid, now) for pid in pids}
        for pid, since in self._since.items():
            late = now >= since + GRACE_SECONDS
            if late or since == now:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or has another user
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)

    def __bool__(self) -> bool:
        return bool(self._since)
