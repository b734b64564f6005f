"""The operator under random disturbances in virtual time; `operator_simulate.py` runs many more seeds."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from opsim_scenario import REGRESSIONS

pytestmark = pytest.mark.timeout(2000)
SECONDS = 1900  # of patience: they take a minute on a machine that has nothing else to do
SIMULATE = [sys.executable, str(Path(__file__).parent / "operator_simulate.py")]
GRIDS = "--seed 9 --grids --verbose"
QUEUES = "--seeds 165:166 --keep-going --queues"
RUNS = (GRIDS, QUEUES, GRIDS)


def simulate(*arguments: str, **environment: str) -> str:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"} | environment
    ran = subprocess.run([*SIMULATE, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False, env=env)
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """Return the output of each of RUNS. One process makes all runs, since a start takes longer than a run; it gets the
    hash seed 0, without which it would start itself anew.
    """
    text = simulate(*" --then ".join(RUNS).split(), PYTHONHASHSEED="0")
    _, *each = re.split(r"^\$ .*\n", text, flags=re.MULTILINE)
    return each


@pytest.fixture(scope="module")
def said(printed: list[str]) -> Mapping[str, str]:
    return dict(zip(RUNS, printed, strict=True))


def check(printed: str, runs: int, times: int = 1) -> None:
    """Check that exactly `times` lines report `runs` runs without a failed one."""
    ends = re.findall(rf"^{runs} runs?, .*, 0 failed $", printed.replace("\r", "\n"), re.MULTILINE)
    assert len(ends) == times, printed


def test_the_operator_gets_over_whatever_befalls_a_job_while_it_chooses_the_grid(said: Mapping[str, str]) -> None:
    """Here the coordinator also chooses the number of stages. `make simulate` tries hundreds of seeds."""
    assert "DISTURBANCE" in said[GRIDS]
    assert " virtual seconds\n" in said[GRIDS]
    assert "PROBLEM" not in said[GRIDS]


@pytest.mark.slow
def test_the_operator_gets_over_more_of_it() -> None:
    check(simulate("--seeds", "2:10", "--keep-going"), 8)


def test_the_operator_gets_over_it_while_others_want_the_quota_of_the_jobs_queue(said: Mapping[str, str]) -> None:
    check(said[QUEUES], 1)


@pytest.mark.slow
def test_what_went_wrong_once_goes_well() -> None:
    check(simulate("--seeds", "0:3", "--keep-going", "--regression", "all"), 3, len(REGRESSIONS))


def test_a_run_is_a_function_of_its_seed(printed: list[str]) -> None:
    """A repeated run has the same output, whatever ran before in the process."""
    assert printed[0] == printed[-1]
