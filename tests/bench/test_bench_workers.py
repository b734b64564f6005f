"""Workers that the scripts in bench/ start with Bamboo's own launcher."""

import subprocess
import sys

import pytest

from folders import ROOT

PROGRAM = """
import asyncio
from _common import Job, TaskName, lab, manifest

async def run():
    async with lab() as place:
        for main in ("_recorder:record", "_recorder:time_steps"):
            job = await Job(place, manifest(TaskName.EMULATED, 1, 1, 2, mode="None"), main=main).run()
            print(len(job.committed))

asyncio.run(run())
"""


@pytest.mark.slow
def test_every_kind_of_worker_trains() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT / "bench", capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "2"]
