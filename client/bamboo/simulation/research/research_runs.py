"""Runs of the published simulator on made-up or recorded nodes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bamboo.simulation.figures import Figures, SimulationError
from bamboo.simulation.processes import in_processes
from bamboo.simulation.research.cost_model import ResearchOptions, simulate
from bamboo.simulation.research.research_events import Moment, ResearchHours
from bamboo.simulation.research.research_workloads import Workload
from bamboo_core.traces.trace import Change, Trace

CHUNK = 8  # runs that a process does before it gives them back


@dataclass(frozen=True, slots=True, kw_only=True)
class ResearchRun:
    """One run with made-up preemptions."""

    workload: Workload
    seed: int
    rate: float
    start_hour: int
    options: ResearchOptions


def simulate_run(run: ResearchRun) -> Figures:
    """Raises SimulationError naming rate and seed."""
    hours = ResearchHours(run.seed, run.rate, run.workload.capacity, run.start_hour)
    try:
        return simulate(run.workload, hours, run.options)
    except SimulationError as error:
        raise SimulationError(f"rate {run.rate:g}, seed {run.seed}: {error}") from None


def simulate_trace(workload: Workload, trace: Trace, options: ResearchOptions) -> Figures:
    """The figures of a run under recorded changes, to the millisecond. Raises SimulationError."""
    moments: list[Moment] = [
        (round(change.at * 1000), change.change is Change.ADD, change.node) for change in trace.changes
    ]
    return simulate(workload, moments, options)


def simulate_all(runs: Sequence[ResearchRun], jobs: int, done: Callable[[int], None]) -> Iterator[Figures]:
    """The figures of all runs, in their order. done: is called with how many more runs are ready. jobs: processes; 1 is
    this one.

    Raises SimulationError for the first run that cannot be done. Processes end with the iterator, also if it is left.
    """
    chunks = [runs[start : start + CHUNK] for start in range(0, len(runs), CHUNK)]
    for found in in_processes(_simulate_chunk, chunks, jobs):
        yield from found
        done(len(found))


def _simulate_chunk(runs: Sequence[ResearchRun]) -> list[Figures]:
    return [simulate_run(run) for run in runs]
