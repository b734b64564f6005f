"""The operator under random trouble in virtual time; `operator_simulate.py` beside this file runs many more of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opsim_acts import NAMED

SIMULATE = [sys.executable, str(Path(__file__).parent / "operator_simulate.py")]


def simulate(*arguments: str) -> str:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    ran = subprocess.run([*SIMULATE, *arguments], capture_output=True, text=True, timeout=280, check=False, env=env)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_operator_gets_over_whatever_befalls_a_job() -> None:
    assert "30 runs" in simulate("--seeds", "0:30", "--keep-going")


@pytest.mark.parametrize("story", NAMED)
def test_what_went_wrong_once_goes_well(story: str) -> None:
    assert "3 runs" in simulate("--seeds", "0:3", "--keep-going", "--story", story)


def test_a_run_is_a_function_of_its_seed() -> None:
    one, other = (simulate("--seed", "18", "--verbose") for _ in range(2))
    assert one == other
    assert "ACT" in one
