"""Hours of the published simulator."""

from dataclasses import replace

from bamboo.simulation.figures import Figures
from bamboo.simulation.research.cost_model import KnownBug, ResearchOptions, simulate
from bamboo.simulation.research.research_events import Moment
from bamboo.simulation.research.research_runs import ResearchRun, simulate_run
from bamboo.simulation.research.research_workloads import Workload, workload_of

BERT = workload_of("bert")


MINUTE = 60_000


TINY = replace(BERT, stages=2, step_ms={1: 4000, 2: 2000}, samples=8)


def published(rate: float, seed: int = 1) -> Figures:
    options = ResearchOptions(steps=BERT.steps)
    return simulate_run(ResearchRun(workload=BERT, seed=seed, rate=rate, start_hour=0, options=options))


def run(moments: list[Moment], minutes: float, *fixed: KnownBug, workload: Workload = TINY) -> Figures:
    options = ResearchOptions(milliseconds=round(minutes * MINUTE), fixed=frozenset(fixed))
    return simulate(workload, moments, options)


def add(*nodes: str, at: int = 0) -> list[Moment]:
    """A millisecond apart, so that their order is plain; all of them meet in one rendezvous."""
    return [(at + number, True, node) for number, node in enumerate(nodes)]
