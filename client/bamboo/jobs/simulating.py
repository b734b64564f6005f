"""`bamboo simulate` and Job.simulate: checks of the options, the runs in virtual time, and their results."""

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from rich.console import Console

from bamboo.job_source import JobSource
from bamboo.jobs.errors import InvalidRequest
from bamboo.jobs.here import changed
from bamboo.jobs.job_profiles import read_profiles
from bamboo.jobs.options import SimulateOptions
from bamboo.profiles.files import shipped_names
from bamboo.simulation.figures import SimulationError, Spread, spread
from bamboo.simulation.job.job_record import JobResult
from bamboo.simulation.job.job_run import JobRun, model_of, simulate_job
from bamboo.simulation.job.job_zones import allowed_zones, made_up, wanted_zones
from bamboo.simulation.processes import in_processes
from bamboo.terminal.run_progress import RunProgress
from bamboo.terminal.simulation_table import simulation_table
from bamboo.traces.files import read_nodes
from bamboo.traces.generate import Generation
from bamboo.traces.trace import NodeTraceError, make_trace, unpriced
from bamboo_core.coordinator.events import Outcome
from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.profile import ProfileError, for_microbatch
from bamboo_core.planning.steps.worker_memory import memory_warning

HOURS = 24.0  # default duration of generated preemptions
ZONE = "zone-a"
MOST_SEEDS = 1_000_000
MOST_HOURS = 87_600.0
MOST_NOTICE = 86_400.0  # seconds
WIDTH = 1000  # columns, so that no line wraps
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCase:
    """The runs with one preemption rate, or the run on one recording. name: the rate, or the recording's files."""

    name: str
    runs: tuple[JobResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRuns:
    """The simulated runs of each case (a preemption rate, or a recording). `print` shows a table of their means.

    spec: the simulated job. warnings: sentences about the job and its profile.
    """

    spec: JobSpec
    by_case: tuple[SimulatedCase, ...]
    warnings: tuple[str, ...]

    @property
    def cases(self) -> dict[str, Spread]:
        """The means and deviations of each case's figures; docs/simulator.md explains them."""
        return {one.name: spread([run.figures for run in one.runs]) for one in self.by_case}

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The case, figures, outcome and final message of each run."""
        return [
            {"case": case.name, **asdict(run.figures), "outcome": run.outcome, "message": run.message}
            for case in self.by_case
            for run in case.runs
        ]

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=WIDTH, color_system=None).print(simulation_table(list(self.cases.items())))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def __repr__(self) -> str:
        return f"<SimulatedRuns of {self.spec.name}: {', '.join(self.cases)}>"


def simulated(job: JobSource, wanted: SimulateOptions, *, say: Say | None = None) -> SimulatedRuns:
    """Simulate the job, once on a recording or for each rate and seed. say: called with each event of a single run.

    Raises InvalidRequest, also for `say` with several runs.
    """
    _check(job, wanted)
    try:
        run, warnings = _run(job, wanted)
        cases = _of_recording(wanted, wanted.trace, run, say) if wanted.trace else _of_rates(wanted, run, say)
    except InvalidRequest:
        raise
    except (SimulationError, NodeTraceError, ProfileError) as error:
        raise InvalidRequest(str(error)) from None
    except ValueError as error:
        raise InvalidRequest(f"{error} (of the profile {wanted.profile})") from None
    return SimulatedRuns(spec=run.spec, by_case=tuple(cases), warnings=tuple(warnings))


def _run(job: JobSource, wanted: SimulateOptions) -> tuple[JobRun, list[str]]:
    """Return the input that all runs share, without a recording yet, and warnings about the job and its profile."""
    assert wanted.profile is not None
    job = with_steps(job, wanted.steps)
    spec = job.spec
    profiles, warnings = read_profiles(job, [wanted.profile])
    profile = profiles[wanted.profile]
    if warning := memory_warning(for_microbatch(profile, spec.training.micro_batch_size), spec):
        warnings.append(warning)
    run = JobRun(
        spec=spec,
        manifest=job.document,
        profile=profile,
        trace=make_trace(),
        seconds=None if wanted.hours is None else wanted.hours * 3600,
        price=wanted.price,
        zone_price=wanted.zone_traffic_price,
        heeds_money=True,
    )
    return run, warnings


def _of_recording(wanted: SimulateOptions, traces: list[str], run: JobRun, say: Say | None) -> list[SimulatedCase]:
    with RunProgress(1, "reading", shown=not wanted.quiet):
        trace = read_nodes(traces)
    if wanted.price is None and (problem := unpriced(trace, all_nodes=True)):
        raise NodeTraceError(problem)
    allowed_zones(run.spec, dict.fromkeys(change.zone for change in trace.changes))
    name = " + ".join(os.path.basename(path) for path in traces)
    with RunProgress(1, shown=not wanted.quiet and say is None):
        seconds = trace.duration if run.seconds is None else min(run.seconds, trace.duration)
        result = simulate_job(replace(run, trace=trace, seconds=seconds), say)
    return [SimulatedCase(name=name, runs=(result,))]


def _of_rates(wanted: SimulateOptions, run: JobRun, say: Say | None) -> list[SimulatedCase]:
    rates, seeds = wanted.preempt_rate or [], _seeds(wanted.seeds)
    generations = [_generation(wanted, run.spec, rate) for rate in rates]
    if say is not None and len(rates) * len(seeds) != 1:
        raise InvalidRequest("--events: expected one run; give --trace, or one --preempt-rate and --seeds A:A")
    every = [(one, seed) for one in generations for seed in seeds]
    with RunProgress(len(every), shown=not wanted.quiet and say is None) as bar:
        results = iter(simulate_seeds(run, every, wanted.jobs or os.cpu_count() or 1, bar.done, say))
    return [SimulatedCase(name=f"{rate:g}", runs=tuple(islice(results, len(seeds)))) for rate in rates]


def simulate_seeds(
    run: JobRun,
    cases: Sequence[tuple[Generation, int]],
    jobs: int,
    done: Callable[[int], None],
    say: Say | None = None,
) -> list[JobResult]:
    """Simulate the job once per case: (settings of a node generator, seed). The results do not depend on `jobs`.

    run: its trace is ignored. jobs: the most processes; with 1, or for one case, this process runs all. done: called
    with 1 after each run. say: called with each event of a single run. Raises SimulationError if a run fails.
    """
    model = model_of(run)  # step times are shared between the runs of a process

    def simulate(case: tuple[Generation, int]) -> JobResult:
        generation, seed = case
        try:
            return simulate_job(replace(run, trace=made_up(generation, run.spec, seed)), say, model)
        except SimulationError as error:
            raise SimulationError(f"rate {generation.removal:g}, seed {seed}: {error}") from None

    results = []
    for result in in_processes(simulate, cases, jobs):
        results.append(result)
        done(1)
    return results


def with_steps(job: JobSource, steps: int | None) -> JobSource:
    """Return the job with `steps` in place of its own length (steps, epochs or tokens); None keeps its length.

    Raises InvalidRequest, also if the number of steps is not known.
    """
    if steps is not None:
        length = {"steps": steps, "epochs": None, "tokens": None}
        job = changed(job, f"--steps {steps}", training={**job.document["spec"]["training"], **length})
    if job.spec.training.known_steps is None:
        raise InvalidRequest("spec.training: only the data tell how many steps its epochs or tokens are; say --steps")
    return job


def check_number(flag: str, value: float | None, most: float, *, zero: bool = False) -> None:
    """Raise InvalidRequest unless the value is None, or above 0 and at most `most`. zero: 0 is allowed, too."""
    if value is not None and not (0 < value <= most or (zero and value == 0)):
        least = "from 0 to" if zero else "above 0 and at most"
        raise InvalidRequest(f"{flag} {value:g}: expected a number {least} {most:.0f}")


def spent_text(spec: JobSpec, runs: Sequence[JobResult]) -> str:
    """Return a clause on the mean steps of the runs that spent the job's money; "" if no run spent it."""
    spent = [run.figures.steps for run in runs if run.outcome == Outcome.INTERRUPTED]
    if not spent:
        return ""
    return f"of {spec.training.steps} steps {sum(spent) / len(spent):.0f} are done when the money is spent"


def _generation(wanted: SimulateOptions, spec: JobSpec, rate: float) -> Generation:
    """Return the settings of generated nodes. Raises SimulationError if the job may run in none of their zones."""
    zones = wanted_zones(spec, wanted.zones, (ZONE,))
    return Generation(
        hours=wanted.hours or HOURS, removal=rate, addition=wanted.replace_rate, zones=zones, notice=wanted.notice
    )


def _check(job: JobSource, options: SimulateOptions) -> None:
    """Check the flags on their own, without the job's spec. Raises InvalidRequest."""
    if options.profile is None:
        known = ", ".join(shipped_names())
        raise InvalidRequest(f"--profile: expected a file that `bamboo profile {job.name}` writes, or one of {known}")
    if bool(options.trace) is bool(options.preempt_rate):
        raise InvalidRequest("--preempt-rate or --trace: expected one of them")
    for rate in options.preempt_rate or ():
        check_number("--preempt-rate", rate, 1.0, zero=True)
    check_number("--replace-rate", options.replace_rate, 1.0, zero=True)
    check_number("--hours", options.hours, MOST_HOURS)
    check_number("--zone-traffic-price", options.zone_traffic_price, 1000.0, zero=True)
    check_number("--notice", options.notice, MOST_NOTICE, zero=True)
    check_number("--price", options.price, 1e6, zero=True)


def _seeds(text: str) -> range:
    """Parse N, the seeds 1 to N, or A:B, the seeds A to B. Raises InvalidRequest."""
    first, colon, last = text.partition(":")
    numbers = [first, last] if colon else ["1", first]
    if not all(number.isascii() and number.isdigit() and len(number) < 10 for number in numbers):
        raise InvalidRequest(f"--seeds must be a number of seeds or A:B, not {text[:40]!r}")
    seeds = range(int(numbers[0]), int(numbers[1]) + 1)
    if not 1 <= len(seeds) <= MOST_SEEDS:
        raise InvalidRequest(f"--seeds must name from 1 to {MOST_SEEDS} seeds, not {text[:40]!r}")
    return seeds
