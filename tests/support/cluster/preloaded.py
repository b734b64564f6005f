"""Containers of the trainer or the operator, forked from a process with all imports: see `warm_processes.py`.

They have the same mounts, environment, folder, session, log, signals and exit code as other containers.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster import children
from warm_process.warm_stand_in import NUMBER_BYTES, send
from warm_processes import start_forker

PRELOADED = (["python", "-m", "bamboo_trainer"], ["python", "-m", "bamboo_operator"])


class Preloaded:
    """The starter of containers. place: the path of the socket of the forker, a process with all imports that forks
    containers. The first container that needs the forker starts it; it ends with this process.
    """

    def __init__(self, place: Path) -> None:
        self._place = place

    async def start(
        self,
        argv: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str],
        folder: str,
        mounts: Sequence[children.Mount],
        scratch: Path,
    ) -> children.Child:
        """Start a container. Fork it if its command begins with one of PRELOADED and this process is root; only root
        may enter another process's mounts. Otherwise use `children.start`.
        """
        if list(argv[:3]) not in PRELOADED or os.getuid() != 0:
            return await children.start(argv, log, env=env, folder=folder, mounts=mounts, scratch=scratch)
        if not self._place.exists():
            start_forker(self._place, {"PATH": os.environ["PATH"], "HOME": "/tmp", "LANG": "C.UTF-8"})
        enter = children.entering(folder, mounts, scratch) if mounts else []
        start = {"arguments": argv[2:], "env": dict(env), "folder": folder, "enter": enter, "group": None, "path": None}
        forker = socket.socket(socket.AF_UNIX)
        forker.connect(str(self._place))
        with log.open("ab") as file, open(os.devnull) as nothing:
            await asyncio.to_thread(send, forker, start, [nothing.fileno(), file.fileno(), file.fileno()])
        reader, writer = await asyncio.open_unix_connection(sock=forker)
        pid = int.from_bytes(await reader.readexactly(NUMBER_BYTES), "big", signed=True)
        return children.Child(Forked(pid, reader, writer), log)


class Forked:
    """A process that the forker has forked. It is killed when its connection (reader, writer) to the forker closes."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._end = asyncio.create_task(self._until_end(reader, writer))

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    async def _until_end(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        code = await reader.read(NUMBER_BYTES)
        self.returncode = int.from_bytes(code, "big", signed=True) if code else -signal.SIGKILL  # died with its parent
        writer.close()
        return self.returncode
