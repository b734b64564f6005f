"""How a container's processes are started: the first one, and those of exec probes."""

import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster import children
from cluster.api import Json
from cluster.environment import Read, command, environment
from cluster.nodes import Image
from cluster.preloaded import Preloaded

Begin = Callable[..., Awaitable[children.Child]]
DEFAULT_MESSAGE_PATH = "/dev/termination-log"


class StartError(Exception):
    """The command cannot be run."""


def base_environment(pod: Json, image: Image, extra: Mapping[str, str]) -> dict[str, str]:
    """Programs are found beside this Python and where the host finds them."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "HOME": "/tmp", "LANG": "C.UTF-8", "HOSTNAME": pod["metadata"]["name"], **extra, **image.env}


@dataclass(slots=True, kw_only=True)
class Start:
    """One start of one container."""

    container: Json
    argv: Sequence[str]
    env: Mapping[str, str]
    mounts: list[children.Mount]
    folder: Path  # for its private files, made when needed
    _started: int = 0

    @classmethod
    async def of(
        cls,
        pod: Json,
        container: Json,
        image: Image,
        extra: Mapping[str, str],
        allocatable: Json,
        read: Read,
        mounts: list[children.Mount],
        folder: Path,
    ) -> "Start":
        """Raises downward.Unknown if something is not there yet, StartError if it will never work."""
        env = await environment(pod, container, base_environment(pod, image, extra), allocatable, read)
        argv = command(container, image.entrypoint, env)
        if not argv:
            raise StartError(f"the pod gives no command, and nothing is known of the image {container['image']}")
        mounted = any(argv[0].startswith(mount.target + "/") for mount in mounts)
        if not mounted and shutil.which(argv[0], path=env["PATH"]) is None:
            raise StartError(f'exec: "{argv[0]}": executable file not found in $PATH')
        if not mounts and not Path(container.get("workingDir", "/tmp")).is_dir():
            raise StartError(f"no such folder: {container['workingDir']}")
        return cls(container=container, argv=argv, env=env, mounts=mounts, folder=folder)

    async def process(self, log: Path, preloaded: Preloaded) -> children.Child:
        path = self.container.get("terminationMessagePath", DEFAULT_MESSAGE_PATH)
        if path != DEFAULT_MESSAGE_PATH:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._message_file.write_text("")
            self.mounts.append(children.Mount(source=self._message_file, target=path))
        return await self._start(preloaded.start, self.argv, log)

    async def execute(self, argv: Sequence[str]) -> int:
        child = await self._start(children.start, argv, Path(os.devnull))
        try:
            return await child.wait()
        finally:
            child.signal_group(signal.SIGKILL)

    def message(self, log: Path, code: int) -> str:
        """What the container left to be told in its status."""
        told = self._message_file.read_text(errors="replace")[-4096:] if self._message_file.exists() else ""
        if not told and code and self.container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            told = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-80:])[-2048:]
        return told

    @property
    def _message_file(self) -> Path:
        return self.folder / "message"

    async def _start(self, begin: Begin, argv: Sequence[str], log: Path) -> children.Child:
        self._started += 1
        log.parent.mkdir(parents=True, exist_ok=True)
        folder = self.container.get("workingDir", "/tmp")
        scratch = self.folder / f"scratch-{self._started}"
        return await begin(argv, log, env=self.env, folder=folder, mounts=self.mounts, scratch=scratch)
