"""Runs of a job in virtual time: what was asked for, the runs, and what became of its money in them."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bamboo.jobs.errors import InvalidRequest
from bamboo.jobs.job_profiles import JobProfiles
from bamboo.jobs.profile_check import check_profiles
from bamboo.local.job_source import JobSource
from bamboo.simulation.figures import SimulationError
from bamboo.simulation.job.job_record import JobResult
from bamboo.simulation.job.job_run import JobRun, simulate_job
from bamboo.simulation.job.job_zones import allowed_zones, made_up, named_zones
from bamboo.simulation.job.zone_traffic import ZONE_TRAFFIC_PRICE
from bamboo.simulation.pool import JobSeed, simulate_jobs
from bamboo.terminal.run_progress import RunProgress
from bamboo.traces.files import read_nodes
from bamboo.traces.generate import Generation
from bamboo.traces.trace import NodeTraceError, make_trace, unpriced
from bamboo_core.coordinator.events import Outcome
from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.profile import ProfileError, for_microbatch
from bamboo_core.planning.steps.worker_memory import memory_warning

HOURS = 24.0  # of made-up preemptions, if nobody says how long
ZONE = "zone-a"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSimulation:
    """A simulation of a job as the user asked for it, on recorded nodes (traces) or on made-up ones, of which so many
    are lost in an hour (rates). say: is told what happens, for one run. shown: progress is, where standard error is a
    terminal.
    """

    job: JobSource
    profile: str
    traces: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    seeds: range = range(1, 11)
    hours: float | None = None
    steps: int | None = None
    replace_rate: float = 0.5
    notice: float | None = None
    zones: tuple[str, ...] = ()  # (): the job's, if it names any
    price: float | None = None
    zone_price: float = ZONE_TRAFFIC_PRICE
    jobs: int | None = None
    say: Callable[[str], None] | None = None
    shown: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCase:
    """The runs of one rate, or the run on one recording, by whose name it is called."""

    name: str
    runs: tuple[JobResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What was simulated. spec: the job as it was. warnings: sentences about the job and its profile."""

    spec: JobSpec
    cases: tuple[SimulatedCase, ...]
    warnings: tuple[str, ...]


def simulated(wanted: JobSimulation) -> Simulated:
    """Simulates. Raises InvalidRequest for whatever cannot be done as it was asked for."""
    try:
        run, warnings = _run(wanted)
        cases = _of_recording(wanted, run) if wanted.traces else _of_rates(wanted, run)
    except InvalidRequest:
        raise
    except (SimulationError, NodeTraceError, ProfileError) as error:
        raise InvalidRequest(str(error)) from None
    except ValueError as error:
        raise InvalidRequest(f"{error} (of the profile {wanted.profile})") from None
    return Simulated(spec=run.spec, cases=tuple(cases), warnings=tuple(warnings))


def _run(wanted: JobSimulation) -> tuple[JobRun, list[str]]:
    """What all runs have in common: the job with the steps and the profile that are asked for; and warnings."""
    job, spec = wanted.job, wanted.job.spec
    if wanted.steps is not None:
        spec = replace(spec, training=replace(spec.training, steps=wanted.steps, epochs=None, tokens=None))
        job = replace(job, spec=spec)
    profile = JobProfiles(job).read(wanted.profile)
    warnings = check_profiles({wanted.profile: profile}, job)
    if warning := memory_warning(for_microbatch(profile, spec.training.micro_batch_size), spec):
        warnings.append(warning)
    run = JobRun(
        spec=spec,
        manifest=job.document,
        profile=profile,
        trace=make_trace(),
        seconds=None if wanted.hours is None else wanted.hours * 3600,
        price=wanted.price,
        zone_price=wanted.zone_price,
        heeds_money=True,
    )
    return run, warnings


def _of_recording(wanted: JobSimulation, run: JobRun) -> list[SimulatedCase]:
    with RunProgress(1, "reading", shown=wanted.shown):
        trace = read_nodes(wanted.traces)
    if wanted.price is None and (told := unpriced(trace, all_nodes=True)):
        raise NodeTraceError(told)
    allowed_zones(run.spec, dict.fromkeys(change.zone for change in trace.changes))
    name = " + ".join(os.path.basename(path) for path in wanted.traces)
    with RunProgress(1, shown=wanted.shown and wanted.say is None):
        seconds = trace.duration if run.seconds is None else min(run.seconds, trace.duration)
        found = simulate_job(replace(run, trace=trace, seconds=seconds), wanted.say)
    return [SimulatedCase(name=name, runs=(found,))]


def _of_rates(wanted: JobSimulation, run: JobRun) -> list[SimulatedCase]:
    generations = [_generation(wanted, run.spec, rate) for rate in wanted.rates]
    if wanted.say is not None:
        if len(wanted.rates) * len(wanted.seeds) != 1:
            raise InvalidRequest("--events: expected one run; give --trace, or one --preempt-rate and --seeds A:A")
        trace = made_up(generations[0], run.spec, wanted.seeds[0])
        found = simulate_job(replace(run, trace=trace), wanted.say)
        return [SimulatedCase(name=f"{wanted.rates[0]:g}", runs=(found,))]
    runs = [JobSeed(run=run, generation=one, seed=seed) for one in generations for seed in wanted.seeds]
    with RunProgress(len(runs), shown=wanted.shown) as bar:
        results = list(simulate_jobs(runs, wanted.jobs or os.cpu_count() or 1, bar.done))
    size = len(wanted.seeds)
    return [
        SimulatedCase(name=f"{rate:g}", runs=tuple(results[at * size : (at + 1) * size]))
        for at, rate in enumerate(wanted.rates)
    ]


def money_told(spec: JobSpec, runs: Sequence[JobResult]) -> str:
    """Return a sentence without its end on runs that ended because the job's money was spent; "" if none did."""
    spent = [run.figures.steps for run in runs if run.outcome == Outcome.INTERRUPTED]
    if not spent:
        return ""
    return f"of {spec.training.steps} steps {sum(spent) / len(spent):.0f} are done when the money is spent"


def _generation(wanted: JobSimulation, spec: JobSpec, rate: float) -> Generation:
    """Raises SimulationError if the job may be in none of the zones."""
    zones = allowed_zones(spec, wanted.zones or named_zones(spec) or (ZONE,))
    return Generation(
        hours=wanted.hours or HOURS, removal=rate, addition=wanted.replace_rate, zones=zones, notice=wanted.notice
    )
