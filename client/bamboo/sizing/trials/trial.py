"""Simulated runs of a candidate, extrapolated to the whole job, since runs are cut early."""

import math
import statistics
from dataclasses import asdict, dataclass

from bamboo.simulation.figures import SimulationError
from bamboo.simulation.job.job_record import JobFigures, JobResult
from bamboo.simulation.job.job_run import CUT, model_of, simulate_job
from bamboo.sizing.trials.candidate import Candidate
from bamboo.sizing.trials.world import HOUR, World
from bamboo_core.job.training_spec import TrainingSpec

LEAST_LATE_STEPS = 20.0  # if at least this number of steps comes after the nodes have settled, these alone set the pace
SURE = 1.645  # standard deviations above the mean of a normal distribution, for 95 of 100


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome(JobFigures):
    """The figures of one simulated run, with hours and USD extrapolated to the whole job.

    hours, usd: infinite if the run failed or completed no step. traffic_usd: the part of usd for traffic between zones.
    simulated: the simulated hours. failed: why the job ended early, "" if it did not.
    """

    traffic_usd: float
    simulated: float
    failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """A candidate and the outcomes of its simulated runs, with means and deviations."""

    candidate: Candidate
    outcomes: tuple[TrialOutcome, ...]

    @property
    def hours(self) -> float:
        return statistics.fmean(outcome.hours for outcome in self.outcomes)

    @property
    def usd(self) -> float:
        return statistics.fmean(outcome.usd for outcome in self.outcomes)

    @property
    def point(self) -> tuple[float, float]:
        return self.hours, self.usd

    def deviation(self, name: str) -> float:
        """Return the sample standard deviation of a figure; 0 for a single run, or if a value is not finite."""
        values = [float(getattr(outcome, name)) for outcome in self.outcomes]
        if len(values) < 2 or not all(map(math.isfinite, values)):
            return 0.0
        return statistics.stdev(values)

    def sure(self, name: str) -> float:
        """Return the hours or USD that 95 of 100 runs do not exceed, if normally distributed. name: hours or usd."""
        return float(getattr(self, name)) + SURE * self.deviation(name)

    def mean(self, name: str) -> float:
        return statistics.fmean(float(getattr(outcome, name)) for outcome in self.outcomes)

    def total(self, name: str) -> float:
        return float(sum(getattr(outcome, name) for outcome in self.outcomes))


def simulate_trial(world: World, candidate: Candidate) -> Assessment:
    """Simulate a candidate once for each seed, and return the assessment. All runs share one model of step times.

    Raises SimulationError if the job cannot be simulated, or no run has a price.
    """
    model, outcomes = None, []
    for seed in range(1, world.seeds + 1):
        run = world.run(candidate, seed)
        model = model or model_of(run)
        result = simulate_job(run, model=model)
        ended = "" if result.outcome in (CUT[0], "Complete") else result.message
        outcomes.append(outcome_of(result, ended, world.spec.training, world.market.settled_hours))
    if all(math.isnan(outcome.usd) for outcome in outcomes):
        raise SimulationError(f"no price is known for {candidate.machine}; say it in a file for --prices")
    return Assessment(candidate=candidate, outcomes=tuple(outcomes))


def outcome_of(result: JobResult, ended: str, training: TrainingSpec, settled: float) -> TrialOutcome:
    """Return the outcome of a simulated run, with the rest of the job extrapolated.

    ended: why the job ended early; "" if it did not. training: of the whole job. settled: hours until the nodes no
    longer depend on the start. Only later steps set the pace if there are LEAST_LATE_STEPS. 0: all steps set it.
    """
    figures = result.figures
    if ended or not figures.steps:
        hours = usd = math.inf
        traffic = 0.0
    else:
        rest = training.steps - figures.steps
        pace = _pace(result, settled, training.global_batch_size)
        hours = figures.hours + rest * pace[0]
        usd = figures.usd + rest * pace[1]
        traffic = figures.zone_usd_per_hour * figures.hours * training.steps / figures.steps
    whole = {**asdict(figures), "hours": hours, "usd": usd}
    return TrialOutcome(**whole, traffic_usd=traffic, simulated=figures.hours, failed=ended)


def _pace(result: JobResult, settled: float, batch: int) -> tuple[float, float]:
    """Return (hours, USD) per step after the nodes have settled, or since training began if too few steps follow."""
    figures, series = result.figures, result.series
    width = series.hours[0]
    late = [i for i, end in enumerate(series.hours) if settled and end - width >= settled]
    steps = sum(series.throughput[i] for i in late) * width * HOUR / batch
    if steps >= LEAST_LATE_STEPS:
        return len(late) * width / steps, sum(series.usd_per_hour[i] for i in late) * width / steps
    hours = figures.hours - figures.begun
    return hours / figures.steps, figures.usd * hours / figures.hours / figures.steps
