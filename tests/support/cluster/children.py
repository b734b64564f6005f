"""Local processes that do not outlive the process that started them."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

ENTER = Path(__file__).with_name("enter.sh")
CHECKOUT = Path(__file__).parents[3]
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A file or folder of this machine (source) that a process sees at the path `target`."""

    source: Path
    target: str
    read_only: bool = False


class Process(Protocol):
    """The members of asyncio's Process that this module uses."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...


@dataclass(slots=True)
class Child:
    """A started process, the leader of a new process group. log: the file that gets its output."""

    process: Process
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: int) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def wait(self) -> int:
        """Wait for the process to end, and kill the rest of its group. Return the exit code, 128 + N for signal N."""
        code = await self.process.wait()
        self.signal_group(signal.SIGKILL)
        return code if code >= 0 else 128 - code


async def start(
    argv: Sequence[str],
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    folder: str = "/",
    mounts: Sequence[Mount] = (),
    scratch: Path | None = None,
) -> Child:
    """Start a command that dies with this process. log: gets its output. scratch: an empty or new folder for mounts."""
    command = ["setpriv", "--pdeathsig", "KILL", "--", *argv]
    if mounts:
        assert scratch is not None
        command = [*entering(folder, mounts, scratch), *command]
        folder = "/"
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=env,
            cwd=folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    return Child(process, log)


def entering(folder: str, mounts: Sequence[Mount], scratch: Path) -> list[str]:
    """Return an `unshare` prefix that runs the command after it in `folder` with these mounts. scratch: see `start`."""
    scratch.mkdir(parents=True, exist_ok=True)
    root = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    triples = [
        text
        for m in (*mounts, *_uncovered(mounts))
        for text in (str(m.source), m.target, "ro" if m.read_only else "rw")
    ]
    unshare = ["unshare", *root, "--mount", "--propagation", "private"]
    return [*unshare, "sh", str(ENTER), str(scratch), folder, *triples, "--"]


def _uncovered(mounts: Sequence[Mount]) -> list[Mount]:
    """Return mounts of the checkout and Python, which serve as the container's image, if `mounts` would hide them."""
    kept = {Path(path).resolve() for path in (CHECKOUT, sys.prefix, sys.base_prefix)}
    hidden = [path for path in kept if any(path.is_relative_to(m.target) for m in mounts if m.source != path)]
    return [Mount(source=path, target=str(path)) for path in sorted(hidden)]


async def stop(child: Child, seconds: float) -> None:
    """Send SIGTERM to the process and wait for its end; kill its whole group then, or after `seconds` at the latest."""
    child.signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(seconds):
            await child.wait()
    except TimeoutError:
        child.signal_group(signal.SIGKILL)
        await child.wait()


def adopt_orphans() -> None:
    """Make this process a subreaper: it becomes the parent of descendants whose own parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants(spared: int | None = None) -> None:
    """Kill all descendants, in any group or session. Needs `adopt_orphans`. spared: ID of a child to leave alone."""
    while True:
        alive = [pid for pid in _children() if is_alive(pid) and pid != spared]
        if not alive:
            return
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            found += [int(pid) for pid in task.read_text().split()]
    return found


def is_alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def marked(variable: str) -> list[int]:
    """Return the IDs of the processes whose environment has this entry. variable: NAME=value."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def tail(log: Path, lines: int = 15) -> str:
    with contextlib.suppress(FileNotFoundError):
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    return ""
