"""The operator under random trouble in virtual time; `operator_simulate.py` beside this file runs many more of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from opsim_scenario import REGRESSIONS

pytestmark = pytest.mark.timeout(2000)
SECONDS = 1900  # of patience: they take a minute on a machine that has nothing else to do
SIMULATE = [sys.executable, str(Path(__file__).parent / "operator_simulate.py")]


def simulate(*arguments: str, **environment: str) -> str:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"} | environment
    ran = subprocess.run([*SIMULATE, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False, env=env)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def many(*arguments: str) -> str:
    """The output of the simulation with the seed of hashes that it would start itself again for."""
    return simulate(*arguments, PYTHONHASHSEED="0")


@pytest.mark.parametrize("seeds", ["0:2", pytest.param("2:10", marks=pytest.mark.slow)])
def test_the_operator_gets_over_whatever_befalls_a_job(seeds: str) -> None:
    """`make simulate` tries hundreds of seeds."""
    first, last = map(int, seeds.split(":"))
    assert f"{last - first} runs" in many("--seeds", seeds, "--keep-going")


def test_the_operator_gets_over_it_while_it_chooses_the_grid() -> None:
    assert "2 runs" in many("--seeds", "0:2", "--keep-going", "--grids")


def test_the_operator_gets_over_it_while_others_want_the_quota_of_the_jobs_queue() -> None:
    assert "2 runs" in many("--seeds", "165:167", "--keep-going", "--queues")


def test_a_reconciliation_that_is_not_due_has_nothing_to_do() -> None:
    """One is made every 2 s all the same. Some of these seeds fail if deadlines, or changes, are not told."""
    assert "4 runs" in many("--seeds", "5010:5014", "--keep-going", "--audit")


@pytest.mark.parametrize("jobs", ["0:1", pytest.param("1:3", marks=pytest.mark.slow)])
def test_what_went_wrong_once_goes_well(jobs: str) -> None:
    """The regressions are run in one job, and in two others."""
    first, last = map(int, jobs.split(":"))
    said = many("--seeds", jobs, "--keep-going", "--regression", "all")
    assert len(re.findall(rf"^{last - first} runs?\b", said, re.MULTILINE)) == len(REGRESSIONS), said


def test_a_run_is_a_function_of_its_seed() -> None:
    one, other = (simulate("--seed", "18", "--verbose") for _ in range(2))
    assert one == other
    assert "DISTURBANCE" in one
