"""Many runs of the research model, over the processors of this machine. Results do not depend on how many these are."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from bamboo.simulation.figures import Figures, SimulationError
from bamboo.simulation.research import ResearchOptions, simulate
from bamboo.simulation.research_events import Moment, ResearchHours
from bamboo.simulation.research_workloads import Workload
from bamboo.traces.trace import Change, Trace

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
    """Under recorded changes, to the millisecond. Raises SimulationError."""
    moments: list[Moment] = [
        (round(change.at * 1000), change.change is Change.ADD, change.node) for change in trace.changes
    ]
    return simulate(workload, moments, options)


def simulate_all(runs: Sequence[ResearchRun], jobs: int, done: Callable[[int], None]) -> Iterator[Figures]:
    """In the order of the runs. done: told how many more runs are ready. jobs: processes; 1 is this one.

    Raises SimulationError for the first run that cannot be done. Processes end with the iterator, also if it is left.
    """
    if jobs == 1:
        for run in runs:
            yield simulate_run(run)
            done(1)
        return
    executor = ProcessPoolExecutor(min(jobs, os.cpu_count() or 1), initializer=_leave_signals_to_parent)
    try:
        chunks = [runs[start : start + CHUNK] for start in range(0, len(runs), CHUNK)]
        for found in executor.map(_simulate_chunk, chunks):
            yield from found
            done(len(found))
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _simulate_chunk(runs: Sequence[ResearchRun]) -> list[Figures]:
    return [simulate_run(run) for run in runs]


def _leave_signals_to_parent() -> None:
    """Ctrl-C goes to all processes of the terminal; the parent ends the others. SIGTERM ends them as usual."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
