"""Simulated trials of candidates, extrapolated to the whole job, since runs are cut early."""

import math
import statistics
from dataclasses import dataclass

from bamboo.simulation.figures import SimulationError
from bamboo.simulation.job.job_record import JobResult
from bamboo.simulation.job.job_run import CUT, model_of, simulate_job
from bamboo.sizing.trials.candidate import Candidate
from bamboo.sizing.trials.world import HOUR, World
from bamboo_core.job.training_spec import TrainingSpec
from bamboo_core.planning.steps.step_times import StepModel

LEAST_LATE_STEPS = 20.0  # after the nodes have settled, so that they count instead of the whole run
SURE = 1.645  # standard deviations above the mean of a normal distribution, for 95 of 100


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateTrial:
    """A candidate to simulate, once with each seed. seconds: virtual time of each run."""

    candidate: Candidate
    seeds: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """The outcome of one run."""

    # hours, usd: of the whole job, infinite if it does not come to its end
    hours: float
    usd: float
    traffic_usd: float  # that is for traffic between zones
    nodes: float
    preemptions: int
    takeovers: int
    restores: int
    fatal: int
    goodput: float
    throughput: float
    simulated: float  # hours
    failed: str = ""  # why the job ended early, "" if it did not


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """A candidate, and its runs so far."""

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
        """Return the standard deviation of a figure, estimated for other runs like these; 0 for a single one."""
        values = [float(getattr(outcome, name)) for outcome in self.outcomes]
        if len(values) < 2 or not all(map(math.isfinite, values)):
            return 0.0
        return statistics.stdev(values)

    def sure(self, name: str) -> float:
        """Return the value that 95 of 100 runs do not exceed, for a normal distribution."""
        return float(getattr(self, name)) + SURE * self.deviation(name)

    def mean(self, name: str) -> float:
        return statistics.fmean(float(getattr(outcome, name)) for outcome in self.outcomes)

    def total(self, name: str) -> float:
        return float(sum(getattr(outcome, name) for outcome in self.outcomes))


def simulate_trial(world: World, trial: CandidateTrial) -> Assessment:
    """Return the assessment of a trial, with one model for all seeds, which share its step times."""
    model = model_of(world.run(trial.candidate, trial.seeds[0], trial.seconds))
    outcomes = tuple(_outcome(world, trial, model, seed) for seed in trial.seeds)
    if all(math.isnan(outcome.usd) for outcome in outcomes):
        raise SimulationError(f"no price is known for {trial.candidate.machine}; say it in a file for --prices")
    return Assessment(candidate=trial.candidate, outcomes=outcomes)


def _outcome(world: World, trial: CandidateTrial, model: StepModel, seed: int) -> TrialOutcome:
    result = simulate_job(world.run(trial.candidate, seed, trial.seconds), model=model)
    ended = "" if result.outcome in (CUT[0], "Complete") else result.message
    return outcome_of(result, ended, world.spec.training, world.market.settled_hours)


def outcome_of(result: JobResult, ended: str, training: TrainingSpec, settled: float) -> TrialOutcome:
    """Return the outcome of a simulated run. training: with the steps of the whole job. settled: hours after which
    nodes no longer depend on the start. The rest of the job is extrapolated from the time after that if the run trained
    then, otherwise from all time since training began.
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
    return TrialOutcome(
        hours=hours,
        usd=usd,
        traffic_usd=traffic,
        nodes=figures.nodes,
        preemptions=figures.preemptions,
        takeovers=figures.takeovers,
        restores=figures.restores,
        fatal=figures.fatal,
        goodput=figures.goodput,
        throughput=figures.throughput,
        simulated=figures.hours,
        failed=ended,
    )


def _pace(result: JobResult, settled: float, batch: int) -> tuple[float, float]:
    """Return the hours and USD of a step of a run that has trained."""
    figures, series = result.figures, result.series
    width = series.hours[0]
    late = [i for i, end in enumerate(series.hours) if settled and end - width >= settled]
    steps = sum(series.throughput[i] for i in late) * width * HOUR / batch
    if steps >= LEAST_LATE_STEPS:
        return len(late) * width / steps, sum(series.usd_per_hour[i] for i in late) * width / steps
    hours = figures.hours - figures.begun
    return hours / figures.steps, figures.usd * hours / figures.hours / figures.steps
