"""Containers that run the trainer or the operator, forked from one process with their imports.

An import takes longer than a small job trains, and tests start hundreds of such pods. Everything else is as for other
containers: mounts, environment, folder, session, log, signals and exit code.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster import children

PARENT = Path(__file__).with_name("preloading.py")
PRELOADED = (["python", "-m", "bamboo_trainer"], ["python", "-m", "bamboo_operator"])


class Preloaded:
    """The starter of containers. Their parent is started when it is first needed. log: for the parent's errors."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._starting = asyncio.Lock()
        self._control: socket.socket | None = None

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
        """Start a container; see children.start, which is used for other commands, and without root, who alone may
        enter another process's mounts.
        """
        if list(argv[:3]) not in PRELOADED or os.getuid() != 0:
            return await children.start(argv, log, env=env, folder=folder, mounts=mounts, scratch=scratch)
        control = await self._parent()
        enter = children.entering(folder, mounts, scratch) if mounts else []
        start = {"arguments": argv[2:], "env": dict(env), "folder": folder, "enter": enter}
        told, tells = os.pipe()
        try:
            with log.open("ab") as file:
                message = json.dumps(start).encode()
                await asyncio.to_thread(socket.send_fds, control, [message], [file.fileno(), tells])
        finally:
            os.close(tells)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(told, "rb")
        )
        pid = await reader.readline()
        if not pid:
            self._control = None  # the next one gets another parent
            raise RuntimeError(f"the parent of preloaded containers has ended: {children.tail(self._log)}")
        return children.Child(Forked(int(pid), reader), log)

    def close(self) -> None:
        """End the parent and all that it has started."""
        if self._control is not None:
            self._control.close()

    async def _parent(self) -> socket.socket:
        async with self._starting:
            if self._control is None:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs, self._log.open("ab") as log:
                    await asyncio.create_subprocess_exec(
                        *("setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-P", str(PARENT)),
                        stdin=theirs,
                        stdout=log,
                        stderr=log,
                        env={"PATH": os.environ["PATH"], "HOME": "/tmp", "LANG": "C.UTF-8"},
                    )
                self._control = ours
            return self._control


class Forked:
    """A process that is another one's child. told: the lines about it that come after its number."""

    def __init__(self, pid: int, told: asyncio.StreamReader) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._end = asyncio.create_task(self._until_end(told))

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    async def _until_end(self, told: asyncio.StreamReader) -> int:
        code = await told.readline()
        self.returncode = int(code) if code else -signal.SIGKILL  # as its parent was
        return self.returncode
