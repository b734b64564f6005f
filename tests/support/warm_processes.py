"""Warm processes: launchers, pods and other processes of jobs that are forked with torch already imported.

An import takes longer than a small job trains, and tests start hundreds of them. A local job starts them as usual, with
pipes, group and signals; the started process stands in for one that is forked from a process with all imports. A test
that kills or freezes launchers, or reads their environment, uses `cold_processes`.
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
    """Start the process that forks warm ones, and that ends with the calling thread. place: the path of its socket."""
    env = {**env, "PYTHONPATH": os.pathsep.join(map(str, (SUPPORT, FOLDER))), "OMP_NUM_THREADS": "1"}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen(100)
        return subprocess.Popen([sys.executable, "-P", str(FOLDER / "forking.py")], stdin=listener, env=env)


class WarmProcesses:
    """The process from which warm ones are forked. Until close(), launchers that this process starts are warm."""

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
