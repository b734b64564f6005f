"""Many runs of a job over this machine's processors. Results do not depend on their number."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from bamboo.simulation.figures import SimulationError
from bamboo.simulation.job.job_record import JobResult
from bamboo.simulation.job.job_run import JobRun, model_of, simulate_job
from bamboo.simulation.job.job_zones import made_up
from bamboo.simulation.processes import in_processes
from bamboo.traces.generate import Generation
from bamboo_core.planning.steps.step_times import StepModel

CHUNK = 2  # runs per task of a process


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSeed:
    """One run of a job with generated preemptions of as many nodes as it wants."""

    run: JobRun  # its trace is ignored
    generation: Generation
    seed: int


def simulate_jobs(runs: Sequence[JobSeed], jobs: int, done: Callable[[int], None]) -> Iterator[JobResult]:
    """Yield the results of runs of one job, in their order. Processes end with the iterator, even if it is abandoned.

    jobs: processes; 1 is this one. done: called with the number of further finished runs. Raises SimulationError for
    the first run that fails.
    """
    chunks = [runs[start : start + CHUNK] for start in range(0, len(runs), CHUNK)]
    for results in in_processes(_simulate_chunk, chunks, jobs):
        yield from results
        done(len(results))


def _simulate_chunk(runs: Sequence[JobSeed]) -> list[JobResult]:
    """Return the results of runs of one job with one model, which shares step times between runs."""
    model = model_of(runs[0].run)
    return [_simulate_seed(run, model) for run in runs]


def _simulate_seed(one: JobSeed, model: StepModel) -> JobResult:
    """Simulate one run. Raises SimulationError with rate and seed."""
    try:
        trace = made_up(one.generation, one.run.spec, one.seed)
        return simulate_job(replace(one.run, trace=trace), model=model)
    except SimulationError as error:
        raise SimulationError(f"rate {one.generation.removal:g}, seed {one.seed}: {error}") from None
