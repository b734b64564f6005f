"""`bamboo plan` and Job.plan: checks of the options, the search, and the reasons for its result."""

import os
from dataclasses import replace
from datetime import UTC, datetime

from bamboo.job_source import JobSource
from bamboo.jobs.errors import InvalidRequest
from bamboo.jobs.job_profiles import read_profiles
from bamboo.jobs.options import PlanOptions
from bamboo.jobs.simulating import MOST_HOURS, MOST_NOTICE, check_number, with_steps
from bamboo.profiles.devices import device_table
from bamboo.profiles.files import shipped_names
from bamboo.simulation.figures import SimulationError
from bamboo.simulation.job.job_zones import allowed_zones, wanted_zones
from bamboo.simulation.job.zone_traffic import ZONE_TRAFFIC_PRICE
from bamboo.sizing.choice import Bounds, comparisons, no_plan, on_demand, reasons
from bamboo.sizing.price_list import PriceError, PriceList, of_devices, read_prices, shipped_prices
from bamboo.sizing.search import MOST_SIMULATED, search
from bamboo.sizing.space import Limits
from bamboo.sizing.trials.world import MachineKind, Market, World, has_price, machine_of
from bamboo.terminal.plan_table import PlanReport
from bamboo.terminal.run_progress import RunProgress
from bamboo.terminal.time_flag import LONGEST_SECONDS
from bamboo.traces.files import read_nodes
from bamboo.traces.generate import Generation, Pattern
from bamboo.traces.trace import NodeTraceError, unpriced
from bamboo_core.job.budget_reach import HOUR, past
from bamboo_core.job.spec import JobSpec, wanted_workers
from bamboo_core.planning.profile import ProfileError

MOST_LISTED = 64
ZONES = ("a", "b", "c")  # of made-up nodes, if neither flags nor job name zones


def planned(job: JobSource, wanted: PlanOptions) -> tuple[PlanReport, tuple[str, ...]]:
    """Search for the job's best machines, grid and protection. Return the result, and warnings about job and profiles.
    Raises InvalidRequest.
    """
    _check(wanted)
    spec, now = job.spec, datetime.now(UTC)
    bounds = _bounds(wanted, spec, now)
    warnings = [*filter(None, [past(spec, now)])]
    try:
        world = _world(job, wanted, warnings)
        limits = _limits(wanted, spec, world.market)
        jobs = wanted.jobs or os.cpu_count() or 1
        with RunProgress(MOST_SIMULATED * world.seeds, shown=not wanted.quiet) as bar:
            found = search(world, limits, bounds, jobs=jobs, done=bar.done)
    except InvalidRequest:
        raise
    except (SimulationError, NodeTraceError, ProfileError, PriceError) as error:
        raise InvalidRequest(str(error)) from None
    except ValueError as error:
        raise InvalidRequest(f"{job.name}: {error}") from None
    instead = comparisons(found.chosen, found.simulated) if found.chosen is not None else []
    if found.chosen is not None and (dear := on_demand(world, found.shortlist.estimated, found.chosen)) is not None:
        instead.append(dear)
    why = no_plan(found.front, bounds) if found.chosen is None else reasons(world, found.chosen, bounds)
    return PlanReport(found=found, reasons=why, instead=tuple(instead), bounds=bounds, world=world), tuple(warnings)


def _bounds(wanted: PlanOptions, spec: JobSpec, now: datetime) -> Bounds:
    """Return the limits on cost (USD) and time (hours) from the options, else from the manifest's budget.

    The manifest's date is ignored if it is past.
    """
    budget, given = wanted.budget, spec.budget
    deadline = None if wanted.deadline is None else wanted.deadline / HOUR
    if budget is None and given is not None and given.money is not None:
        budget = float(given.money)
    if deadline is None and given is not None and given.done_by is not None and given.done_by > now:
        deadline = (given.done_by - now).total_seconds() / HOUR
    return Bounds(budget=budget, deadline=deadline)


def _world(job: JobSource, wanted: PlanOptions, warnings: list[str]) -> World:
    job, prices = with_steps(job, wanted.steps), _prices(wanted)
    spec = job.spec
    machines = _machines(prices, wanted, job, warnings)
    market = _market(wanted, spec)
    for name, machine in machines.items():
        if not has_price(machine, spec, market):
            listed_here = ", ".join(shipped_prices())
            raise SimulationError(
                f"no price is known for {name}; say it in a file for --prices ({listed_here} comes with Bamboo)"
            )
    return World(
        spec=spec,
        document=job.document,
        machines=machines,
        market=market,
        hours=wanted.hours,
        seeds=wanted.seeds,
        traffic_price=prices.network.between_zones if prices else ZONE_TRAFFIC_PRICE,
    )


def _prices(wanted: PlanOptions) -> PriceList | None:
    """Return the price list of --prices, or with --device alone Bamboo's newest list; None if neither flag is given.
    --device also limits the list to machines with these devices. Raises PriceError.
    """
    devices = _names(wanted.device)
    path = wanted.prices or (shipped_prices()[-1] if devices else None)
    if path is None:
        return None
    prices = read_prices(path)
    return of_devices(path, prices, devices) if devices else prices


def _machines(
    prices: PriceList | None, wanted: PlanOptions, job: JobSource, warnings: list[str]
) -> dict[str, MachineKind]:
    """Return the kinds of machines, by name: those of the price list, or without one the machine of --profile. Append
    warnings about the profiles to `warnings`. Raises ProfileError, PriceError.
    """
    if prices is None:
        assert wanted.profile is not None
        profiles, doubts = read_profiles(job, [wanted.profile])
        warnings += doubts
        return {one.name: machine_of(one, None) for one in profiles.values()}
    paths = {}
    for name, price in prices.machines.items():
        if (path := price.profile or wanted.profile) is None:
            wrong = f"machines.{name}: expected a profile, or --profile for all machines without one"
            raise PriceError(f"{wanted.prices}: {wrong}")
        paths[name] = path
    profiles, doubts = read_profiles(job, dict.fromkeys(paths.values()))
    warnings += doubts
    return {name: machine_of(profiles[path], prices.machines[name]) for name, path in paths.items()}


def _market(wanted: PlanOptions, spec: JobSpec) -> Market:
    """Return the recorded or generated spot nodes in the job's allowed zones. Raises InvalidRequest, NodeTraceError,
    SimulationError.
    """
    if wanted.trace:
        with RunProgress(1, "reading", shown=not wanted.quiet):
            recording = read_nodes(wanted.trace)
        if problem := unpriced(recording, all_nodes=True):
            raise NodeTraceError(problem)
        zones = allowed_zones(spec, dict.fromkeys(change.zone for change in recording.changes))
        changes = [change for change in recording.changes if change.zone in zones]
        return Market(recording=replace(recording, changes=tuple(changes)))
    patterns = [pattern.value for pattern in Pattern]
    if wanted.pattern not in patterns:
        raise InvalidRequest(f"--pattern must be one of {', '.join(patterns)}, not {wanted.pattern[:40]!r}")
    assert wanted.preempt_rate is not None
    return Market(
        generation=Generation(
            pattern=Pattern(wanted.pattern),
            nodes=wanted_workers(spec),
            removal=wanted.preempt_rate,
            addition=wanted.replace_rate,
            zones=wanted_zones(spec, wanted.zones, ZONES),
            notice=wanted.notice,
        )
    )


def _limits(wanted: PlanOptions, spec: JobSpec, market: Market) -> Limits:
    batch, micro_batches = spec.training.global_batch_size, _numbers(wanted.micro_batch, "--micro-batch")
    stages, pipelines = _numbers(wanted.stages, "--stages"), _numbers(wanted.pipelines, "--pipelines")
    for size in micro_batches:
        if batch % size:
            raise InvalidRequest(
                f"--micro-batch {size}: expected sizes of which training.globalBatchSize, {batch}, is a multiple"
            )
    for flag, given, chosen in (
        ("--stages", stages, spec.topology.chooses_stages),
        ("--pipelines", pipelines, spec.topology.chooses_pipelines),
    ):
        if given and chosen:
            raise InvalidRequest(f"{flag}: expected only where spec.topology says a number, as they are chosen")
    room, most = spec.spread.workers_per_node, 2 * wanted_workers(spec)
    if nodes := wanted.nodes or (market.figures.peak if market.figures is not None else 0):
        most = nodes * room
    return Limits(
        nodes=most,
        stages=stages,
        pipelines=pipelines,
        micro_batches=micro_batches,
        standby=_numbers(wanted.standby, "--standby", least=0),
    )


def _check(options: PlanOptions) -> None:
    """Check the flags on their own, without the job. Raises InvalidRequest."""
    if not options.trace and options.preempt_rate is None:
        raise InvalidRequest("--preempt-rate or --trace: expected one of them")
    for name, value in (("--preempt-rate", options.preempt_rate), ("--replace-rate", options.replace_rate)):
        check_number(name, value, 1.0, zero=True)
    for name, amount, most in (
        ("--budget", options.budget, 1e9),
        ("--deadline", options.deadline, LONGEST_SECONDS),
        ("--hours", options.hours, MOST_HOURS),
        ("--notice", options.notice, MOST_NOTICE),
    ):
        check_number(name, amount, most)
    if options.profile is not None and options.device is not None:
        raise InvalidRequest(
            "--device: not with --profile, which says on what device the job runs; @NAME is a profile, too"
        )
    if options.profile is None and options.prices is None and options.device is None:
        raise InvalidRequest(
            f"--device: expected some of {', '.join(device_table().devices)}; or --profile with a file that `bamboo"
            f" profile` writes, or one of {', '.join(shipped_names())}; or --prices with machines that have one"
        )


def _names(text: str | None) -> tuple[str, ...]:
    """Parse devices such as "a100,h100", without repetitions. Raises InvalidRequest."""
    names = tuple(part.strip() for part in text.split(",")) if text is not None else ()
    if not all(names) or len(names) > MOST_LISTED:
        raise InvalidRequest(
            f"--device {(text or '')[:40]!r}: expected at most {MOST_LISTED} names of devices, with commas"
        )
    return tuple(dict.fromkeys(names))


def _numbers(text: str | None, name: str, least: int = 1) -> tuple[int, ...]:
    """Parse whole numbers such as "4,8,12", sorted and without repetitions. Raises InvalidRequest."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    known = all(part.isascii() and part.isdigit() and len(part) < 10 and int(part) >= least for part in parts)
    if not known or len(parts) > MOST_LISTED:
        raise InvalidRequest(
            f"{name} {text[:40]!r}: expected at most {MOST_LISTED} whole numbers from {least} on, with commas"
        )
    return tuple(sorted({int(part) for part in parts}))
