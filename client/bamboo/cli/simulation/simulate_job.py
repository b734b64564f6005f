"""`bamboo simulate JOB.yaml`: from its flags to runs of the job in virtual time."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from bamboo.cli.dispatch import usage
from bamboo.cli.simulation.job_profiles import JobProfiles
from bamboo.cli.simulation.profile_check import check_profiles
from bamboo.cli.simulation.run_progress import RunProgress
from bamboo.simulation.figures import SimulationError
from bamboo.simulation.job.job_record import JobResult
from bamboo.simulation.job.job_run import JobRun, simulate_job
from bamboo.simulation.job.job_zones import allowed_zones, made_up, named_zones
from bamboo.simulation.pool import JobSeed, simulate_jobs
from bamboo.traces.files import read_nodes
from bamboo.traces.generate import Generation
from bamboo_core.coordinator.events import Outcome
from bamboo_core.job.budget_reach import Pace, done_by, outcome_told, shown_date
from bamboo_core.job.manifest import ManifestError, parse_source
from bamboo_core.job.pod_fields import unknown_in_template
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.yaml_file import read_manifest_source
from bamboo_core.planning.profile import ProfileError, for_microbatch
from bamboo_core.planning.steps.worker_memory import memory_warning
from bamboo_core.traces.trace import NodeTraceError, make_trace, unpriced

HOURS = 24.0  # of made-up preemptions, if nobody says how long
ZONE = "zone-a"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSimulation:
    """A simulation of a job as the user asked for it, checked as far as the flags themselves go."""

    job: Path
    profile: str
    traces: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: range
    hours: float | None
    steps: int | None
    replace_rate: float
    notice: float | None
    zones: tuple[str, ...]  # (): the job's, if it names any
    price: float | None
    zone_price: float
    jobs: int | None
    begin: datetime


def job_run(wanted: JobSimulation) -> JobRun:
    """What all runs have in common. A mistake ends the command."""
    try:
        return _run(wanted)
    except (SimulationError, ProfileError) as error:
        usage(str(error))
    except ValueError as error:
        usage(f"{error} (of the profile {wanted.profile})")


def job_cases(
    wanted: JobSimulation,
    run: JobRun,
    say: Callable[[str], None] | None,
    progress: Callable[[int, str], RunProgress],
) -> list[tuple[str, list[JobResult]]]:
    """Each case with its runs. run: what these have in common. say: is told what happens, if there is one run. A
    mistake ends the command.
    """
    try:
        if warning := memory_warning(for_microbatch(run.profile, run.spec.training.micro_batch_size), run.spec):
            print(f"warning: {warning}", file=sys.stderr)
        if wanted.traces:
            with progress(1, "reading"):
                trace = read_nodes(wanted.traces)
            if wanted.price is None and (told := unpriced(trace, all_nodes=True)):
                raise NodeTraceError(told)
            allowed_zones(run.spec, dict.fromkeys(change.zone for change in trace.changes))
            name = " + ".join(os.path.basename(path) for path in wanted.traces)
            with progress(1 if say is None else 0, "simulating"):
                seconds = trace.duration if run.seconds is None else min(run.seconds, trace.duration)
                return [(name, [simulate_job(replace(run, trace=trace, seconds=seconds), say)])]
        generations = [_generation(wanted, run.spec, rate) for rate in wanted.rates]
        if say is not None:
            if len(wanted.rates) * len(wanted.seeds) != 1:
                usage("--events: expected one run; give --trace, or one --preempt-rate and --seeds A:A")
            trace = made_up(generations[0], run.spec, wanted.seeds[0])
            return [(f"{wanted.rates[0]:g}", [simulate_job(replace(run, trace=trace), say)])]
        runs = [JobSeed(run=run, generation=one, seed=seed) for one in generations for seed in wanted.seeds]
        with progress(len(runs), "simulating") as bar:
            found = list(simulate_jobs(runs, wanted.jobs or os.cpu_count() or 1, bar.done))
    except (SimulationError, NodeTraceError, ProfileError) as error:
        usage(str(error))
    except ValueError as error:
        usage(f"{error} (of the profile {wanted.profile})")
    size = len(wanted.seeds)
    return [(f"{rate:g}", found[at * size : (at + 1) * size]) for at, rate in enumerate(wanted.rates)]


def _run(wanted: JobSimulation) -> JobRun:
    """The job with the steps and the profile that are asked for. A manifest that is wrong ends the command."""
    try:
        source = read_manifest_source(str(wanted.job))
        spec = parse_source(source, unknown_in_template)
    except ManifestError as error:
        usage(*map(str, error.problems))
    if wanted.steps is not None:
        spec = replace(spec, training=replace(spec.training, steps=wanted.steps, until=None))
    profile = JobProfiles(spec, dict(source.document), wanted.job).read(wanted.profile)
    check_profiles({wanted.profile: profile}, spec, dict(source.document), wanted.job)
    return JobRun(
        spec=spec,
        manifest=source.document,
        profile=profile,
        trace=make_trace(),
        seconds=None if wanted.hours is None else wanted.hours * 3600,
        price=wanted.price,
        zone_price=wanted.zone_price,
        began=wanted.begin,
    )


def budget_sentences(spec: JobSpec, begin: datetime, runs: Sequence[JobResult]) -> list[str]:
    """What became of the job's date and of its money: sentences without their ends."""
    date, told = done_by(spec), list[str]()
    if date is not None:
        ends = sorted(_end(begin, spec, run) for run in runs)
        met = sum(left == 0 and end <= date for left, end, _ in ends)
        left, end, step_seconds = ends[-1]
        steps = spec.training.steps
        worst = outcome_told(date, end, Pace(step=steps - left, steps=steps, step_seconds=step_seconds))
        told.append(
            worst if len(runs) == 1 else f"{met} of {len(runs)} are done by {shown_date(date)}; the last: {worst}"
        )
    spent = [run.figures.steps for run in runs if run.outcome == Outcome.INTERRUPTED]
    if spent:
        told.append(f"of {spec.training.steps} steps {sum(spent) / len(spent):.0f} are done when the money is spent")
    return told


def _end(begin: datetime, spec: JobSpec, run: JobResult) -> tuple[int, datetime, float | None]:
    """Steps that are left, when it ended, and seconds of a step, by all the time since it began to train."""
    found = run.figures
    seconds = (found.hours - found.begun) * 3600 / found.steps if found.steps else None
    return max(0, spec.training.steps - found.steps), begin + timedelta(hours=found.hours), seconds


def _generation(wanted: JobSimulation, spec: JobSpec, rate: float) -> Generation:
    """Raises SimulationError if the job may be in none of the zones."""
    zones = allowed_zones(spec, wanted.zones or named_zones(spec) or (ZONE,))
    return Generation(
        hours=wanted.hours or HOURS, removal=rate, addition=wanted.replace_rate, zones=zones, notice=wanted.notice
    )
