"""Containers as local processes: their start and their termination messages."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster import children
from cluster.api import Json
from cluster.environment import command, environment
from cluster.preloaded import Preloaded


def base_environment(pod: Json, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of every container of a pod. PATH begins with this Python's folder."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "HOME": "/tmp", "LANG": "C.UTF-8", "HOSTNAME": pod["metadata"]["name"], **extra}


async def start(
    pod: Json,
    container: Json,
    log: Path,
    preloaded: Preloaded,
    *,
    extra: Mapping[str, str],
    mounts: Sequence[children.Mount],
    scratch: Path,
) -> children.Child:
    """Start a container. extra: variables that its own may use or replace. scratch: an empty or new folder for mounts.

    Raises Unknown if a variable refers to an unset pod field, or to something other than a pod field. A command that
    cannot run ends at once; its log says why.
    """
    env = environment(pod, container, base_environment(pod, extra))
    argv, folder = command(container, env), container.get("workingDir", "/tmp")
    log.parent.mkdir(parents=True, exist_ok=True)
    return await preloaded.start(argv, log, env=env, folder=folder, mounts=mounts, scratch=scratch)


def message(container: Json, log: Path, code: int) -> str:
    """Return a container's termination message: the end of its log if it failed and its policy says so, else ""."""
    if not code or container.get("terminationMessagePolicy") != "FallbackToLogsOnError":
        return ""
    return "".join(log.read_text(errors="replace").splitlines(keepends=True)[-80:])[-2048:]
