"""The published simulator's six models."""

from bamboo.simulation.research.cost_model import ResearchOptions
from bamboo.simulation.research.research_runs import ResearchRun, simulate_run
from bamboo.simulation.research.research_workloads import WORKLOADS, workload_of


def test_every_workload_trains() -> None:
    for name in WORKLOADS:
        options = ResearchOptions(milliseconds=6 * 3_600_000)
        found = simulate_run(ResearchRun(workload=workload_of(name), seed=2, rate=0.25, start_hour=0, options=options))
        assert 0 < found.hours <= 6
