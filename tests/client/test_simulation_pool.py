"""Many runs over several processes."""

from bamboo.simulation.research.cost_model import ResearchOptions
from bamboo.simulation.research.research_runs import ResearchRun, simulate_all
from research_kit import BERT


def test_processes_change_no_result() -> None:
    options = ResearchOptions(steps=500)
    runs = [ResearchRun(workload=BERT, seed=seed, rate=0.5, start_hour=7, options=options) for seed in range(20)]
    told: list[int] = []
    assert list(simulate_all(runs, 2, told.append)) == list(simulate_all(runs, 1, told.append))
    assert sum(told) == 40
