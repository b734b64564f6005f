"""Launchers of workers, and other processes of local jobs, that need not import torch; tests start hundreds of them.

Importing takes longer than such a job trains. A job starts them as ever, with pipes, group and signals; what it starts
stands in for a process that is forked from one that has imported everything once. A test that kills or freezes
launchers, or looks at their environment, asks for `cold_processes`.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from folders import SUPPORT
from warm_process import warm_stand_in

FOLDER = SUPPORT / "warm_process"
PLACE = "BAMBOO_WARM_PROCESSES"


class WarmProcesses:
    """From now on processes with this one's environment have warm ones, until close()."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="bamboo-warm-"))
        place = str(self._folder / "socket")
        Path(f"{place}.json").write_text(json.dumps(warm_stand_in.read_at_start()))
        python_path = os.pathsep.join(map(str, (SUPPORT, FOLDER)))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(place)
            listener.listen(100)
            self._forker = subprocess.Popen(
                [sys.executable, "-P", str(FOLDER / "forking.py")],
                stdin=listener,
                env={**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
            )
        os.environ[PLACE] = place
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))

    def close(self) -> None:
        self._forker.kill()
        self._forker.wait()
        shutil.rmtree(self._folder)
