"""The protocol under random faults, in virtual time: no bit is lost, and no run hangs. See `simulate.py`."""

import pytest

from sim_faults import scenario
from sim_job import Simulation
from simulate import command, run_seed

QUIET, BATCHES, BATCH = 25, 15, 20


@pytest.mark.parametrize("seed", range(QUIET))
def test_without_faults_the_job_ends_as_the_oracle_says(seed: int) -> None:
    """The jobs of seeds that are not used below; one of them with another number of pipelines."""
    job = Simulation(scenario(10_000 + seed, elastic=True))
    job.strikes.left.clear()
    verdict = job.run()
    assert verdict.problem is None, verdict.problem
    assert verdict.kind == "Complete"


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_faults(batch: int) -> None:
    failed = [v for v in map(run_seed, range(batch * BATCH, (batch + 1) * BATCH)) if v.problem]
    assert not failed, "\n".join(f"{v.problem}\n    {command(v.seed)}" for v in failed)


def test_equal_seeds_give_equal_runs() -> None:
    stories: list[list[str]] = [[], []]
    for lines in stories:
        Simulation(scenario(3), lines.append).run()
    assert stories[0] == stories[1]
    assert len(stories[0]) > 100
