"""Copies between the devices of a worker, timed: what the program says, and that it says no more than it knows."""

import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pretended_gpu

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "bench/devices.py", "--copies", "--megabytes", "1", "--rounds", "2"]


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "bench")
        yield importlib.import_module("devices")


def test_ratios_are_of_one_round(script: Any) -> None:
    """Times of the first round are ten times those of the second one, as on a busy machine."""
    rounds = [{"direct": 0.1, "pinned host": 0.2, "pageable host": 0.8}]
    rounds.append({name: seconds / 10 for name, seconds in rounds[0].items()})
    direct, pinned, pageable = script.told(rounds, 110_000_000)
    assert direct.endswith("2.0 GB/s   1.00 (1.00 to 1.00) times as long")
    assert pinned.endswith("1.0 GB/s   2.00 (2.00 to 2.00) times as long")
    assert pageable.endswith("8.00 (8.00 to 8.00) times as long")


def test_without_two_gpus_nothing_is_timed(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script.print_copies([1000], 1)
    assert capsys.readouterr().out == "There are no two GPUs here, so there is no direct way to time.\n"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(pretended_gpu.COMPILER) is None, reason="no compiler")
@pytest.mark.timeout(300)
def test_on_pretended_gpus_each_way_brings_the_tensor() -> None:
    there = pretended_gpu.environment(pretended_gpu.built())
    done = subprocess.run(PROGRAM, cwd=ROOT, env=there, capture_output=True, text=True, timeout=240.0, check=False)
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert "pretended" in first
    pairs = [line for line in lines if not line.startswith(" ")]
    assert pairs == [f"cuda:{n} to cuda:{n + 1}, 1 MB" for n in range(3)]
    assert len(lines) == 4 * len(pairs)
