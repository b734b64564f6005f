"""bench/gpu.py: its measurements of throughput and kills, with tiny sizes, on any device."""

import json
import subprocess
import sys

import pytest

from folders import ROOT

PROGRAM = [sys.executable, "bench/gpu.py", "--small", "--minutes", "25", "--losses", "2", "--only", "throughput,kills"]


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_it_measures_and_prints_one_object() -> None:
    done = subprocess.run(PROGRAM, cwd=ROOT, capture_output=True, text=True, timeout=1600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["left_out"] == []
    sides = report["throughput"]
    assert [one["ratio"] > 0 for one in sides.values()] == [True] * 3
    kills = report["kills"]
    assert (kills["losses"], len(kills["pauses_ms"]), len(kills["bytes_in_use"])) == (2, 2, 3)
    assert all(ratio > 0 for ratio in kills["affected_over_step"])
