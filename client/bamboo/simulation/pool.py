"""Many runs, of either model, over the processors of this machine. Results do not depend on how many these are."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from bamboo.simulation.figures import Figures, SimulationError
from bamboo.simulation.job.job_record import JobResult
from bamboo.simulation.job.job_run import JobRun, model_of, simulate_job
from bamboo.simulation.job.job_zones import made_up
from bamboo.simulation.processes import in_processes
from bamboo.simulation.research.cost_model import ResearchOptions, simulate
from bamboo.simulation.research.research_events import Moment, ResearchHours
from bamboo.simulation.research.research_workloads import Workload
from bamboo.traces.generate import Generation
from bamboo_core.planning.steps.step_times import StepModel
from bamboo_core.traces.trace import Change, Trace

CHUNK = 8  # runs that a process does before it gives them back
JOB_CHUNK = 2  # the same of runs of a job, which take longer
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResearchRun:
    """One run with made-up preemptions."""

    workload: Workload
    seed: int
    rate: float
    start_hour: int
    options: ResearchOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSeed:
    """One run of a job with made-up preemptions, of as many nodes as it wants."""

    run: JobRun  # its trace does not count
    generation: Generation
    seed: int


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
    yield from _in_chunks(_simulate_chunk, runs, (jobs, CHUNK), done)


def simulate_jobs(runs: Sequence[JobSeed], jobs: int, done: Callable[[int], None]) -> Iterator[JobResult]:
    """The results of runs of one job, as by `simulate_all`. Raises SimulationError for the first run that cannot be
    done.
    """
    yield from _in_chunks(_simulate_seeds, runs, (jobs, JOB_CHUNK), done)


def _in_chunks(
    simulate_chunk: Callable[[Sequence[T]], list[R]],
    runs: Sequence[T],
    at_once: tuple[int, int],
    done: Callable[[int], None],
) -> Iterator[R]:
    """The results of all runs, which processes do chunk by chunk. at_once: processes, and runs that a process does
    before it gives them back.
    """
    jobs, size = at_once
    chunks = [runs[start : start + size] for start in range(0, len(runs), size)]
    for found in in_processes(simulate_chunk, chunks, jobs):
        yield from found
        done(len(found))


def _simulate_chunk(runs: Sequence[ResearchRun]) -> list[Figures]:
    return [simulate_run(run) for run in runs]


def _simulate_seeds(runs: Sequence[JobSeed]) -> list[JobResult]:
    """The results of runs of one job with one model, since the step times of one run are of use to the next."""
    model = model_of(runs[0].run)
    return [_simulate_seed(run, model) for run in runs]


def _simulate_seed(one: JobSeed, model: StepModel) -> JobResult:
    """Raises SimulationError naming rate and seed."""
    try:
        trace = made_up(one.generation, one.run.spec, one.seed)
        return simulate_job(replace(one.run, trace=trace), model=model)
    except SimulationError as error:
        raise SimulationError(f"rate {one.generation.removal:g}, seed {one.seed}: {error}") from None
