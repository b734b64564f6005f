"""The operator under random trouble in virtual time; `python tests/operator_simulate.py` runs many more of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SIMULATE = [sys.executable, str(Path(__file__).parent / "operator_simulate.py")]


@pytest.mark.timeout(600)
def test_the_operator_gets_over_whatever_befalls_a_job() -> None:
    """Seeds in which faults were found once are among these."""
    ran = subprocess.run(
        [*SIMULATE, "--seeds", "0:40", "--keep-going"], capture_output=True, text=True, timeout=580, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "40 runs" in ran.stdout


def test_a_run_is_a_function_of_its_seed() -> None:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    one, other = (
        subprocess.run(
            [*SIMULATE, "--seed", "18", "--verbose"], capture_output=True, text=True, timeout=120, check=True, env=env
        )
        for _ in range(2)
    )
    assert one.stdout == other.stdout
    assert "ACT" in one.stdout
