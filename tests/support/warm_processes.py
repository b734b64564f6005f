"""Warm processes: launchers, pods and other processes of jobs that are forked with torch already imported.

The imports take longer than a small job trains, and tests start hundreds of processes. A local job starts its processes
as usual, with pipes, group and signals; each stands in for one that is forked from a process with all imports. A test
that kills or freezes launchers, or reads their environment, must use `cold_processes`.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from folders import SUPPORT
from warm_process import warm_stand_in

FOLDER = SUPPORT / "warm_process"
PLACE = "BAMBOO_WARM_PROCESSES"


def start_forker(place: Path, env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start the forker of warm processes, which ends with the calling thread. place: the path for its socket."""
    env = {**env, "PYTHONPATH": os.pathsep.join(map(str, (SUPPORT, FOLDER))), "OMP_NUM_THREADS": "1"}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen(100)
        return subprocess.Popen([sys.executable, "-P", str(FOLDER / "forking.py")], stdin=listener, env=env)


class WarmProcesses:
    """The forker of warm processes. Until close(), launchers and `offline` processes with this environment are warm."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="bamboo-warm-"))
        place = self._folder / "socket"
        Path(f"{place}.json").write_text(json.dumps(warm_stand_in.read_at_start()))
        self._forker = start_forker(place, os.environ)
        os.environ[PLACE] = str(place)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))

    def close(self) -> None:
        self._forker.kill()
        self._forker.wait()
        shutil.rmtree(self._folder)
