"""The start of a container's process: its command, environment, mounts and termination message."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster import children
from cluster.api import Json
from cluster.environment import command, environment
from cluster.preloaded import Preloaded

DEFAULT_MESSAGE_PATH = "/dev/termination-log"


class StartError(Exception):
    """A command that cannot be run."""


def base_environment(pod: Json, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the first variables of a container. Programs are found beside this Python and on the host's PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "HOME": "/tmp", "LANG": "C.UTF-8", "HOSTNAME": pod["metadata"]["name"], **extra}


@dataclass(slots=True, kw_only=True)
class Start:
    """One start of one container."""

    container: Json
    argv: Sequence[str]
    env: Mapping[str, str]
    mounts: list[children.Mount]
    folder: Path  # for its private files, made when needed

    @classmethod
    def of(
        cls,
        pod: Json,
        container: Json,
        extra: Mapping[str, str],
        mounts: list[children.Mount],
        folder: Path,
    ) -> "Start":
        """Prepare a start. Raises Unknown if an object does not exist yet, StartError if the container can never
        start.
        """
        env = environment(pod, container, base_environment(pod, extra))
        argv = command(container, env)
        if not argv:
            raise StartError("the pod names no command, and the test cluster knows no images")
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
        log.parent.mkdir(parents=True, exist_ok=True)
        workdir, scratch = self.container.get("workingDir", "/tmp"), self.folder / "scratch"
        return await preloaded.start(self.argv, log, env=self.env, folder=workdir, mounts=self.mounts, scratch=scratch)

    def message(self, log: Path, code: int) -> str:
        """Return the termination message of a container."""
        told = self._message_file.read_text(errors="replace")[-4096:] if self._message_file.exists() else ""
        if not told and code and self.container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            told = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-80:])[-2048:]
        return told

    @property
    def _message_file(self) -> Path:
        return self.folder / "message"
