"""Launchers of workers that need not import torch, for the hundreds of local jobs that tests run.

Importing takes longer than such a job trains. A job starts its launcher as ever, with its pipes, group and signals; the
process that it starts stands in for one that is forked from a process that has imported everything once. A test that
kills or freezes launchers asks for `cold_launchers`.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from folders import SUPPORT

FOLDER = SUPPORT / "warm_launcher"
PLACE = "BAMBOO_WARM_LAUNCHERS"


class WarmLaunchers:
    """From now on processes with this one's environment start warm launchers, until close()."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="bamboo-warm-"))
        place = str(self._folder / "socket")
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
