"""`bamboo compare`: from its flags to Bamboo and published strategies under the same nodes."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from bamboo.cli.dispatch import usage
from bamboo.cli.simulation.job_file import job_of
from bamboo.jobs.job_profiles import JobProfiles
from bamboo.jobs.profile_check import check_profiles
from bamboo.profiles.files import read_profile
from bamboo.simulation.comparison import STRATEGIES, ComparedJob, compared, own_job, published_job
from bamboo.simulation.figures import SimulationError, Spread
from bamboo.simulation.strategies.drive import StrategyResult
from bamboo.simulation.strategies.summary import spread_of
from bamboo.traces.files import read_nodes
from bamboo.traces.generate import Generation, generate
from bamboo_core.job.placement_spec import Capacity, pool_price
from bamboo_core.planning.profile import Prices, ProfileError
from bamboo_core.traces.trace import NodeTraceError, Trace

HOURS = 24.0  # of made-up preemptions, if nobody says how long


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A comparison of strategies as the user asked for it."""

    job: Path | None  # says the batch and the grid, instead of what was published
    strategies: tuple[str, ...]  # none means all
    workload: str
    profile: str | None  # a file or a name; of one of the published models if none is given
    traces: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: range
    hours: float | None
    replace_rate: float
    zone_price: float


def cases_of(wanted: Comparison, done: Callable[[int], None]) -> list[tuple[str, Spread]]:
    """A case for each rate (or the traces) and strategy. done: is told of each run. A mistake ends the command."""
    names = _strategies(wanted.strategies)
    try:
        job = _job(wanted)
        job = replace(job, place=replace(job.place, zone_price=wanted.zone_price))
        return [
            (f"{case} {name}", spread_of([_run(name, job, trace, wanted.hours, done) for trace in traces]))
            for case, traces in _cases(wanted, job.place.nodes)
            for name in names
        ]
    except (ProfileError, SimulationError, NodeTraceError) as error:
        usage(str(error))


def _job(wanted: Comparison) -> ComparedJob:
    """Raises ProfileError or SimulationError."""
    name = wanted.profile or f"{wanted.workload}-v100"
    if wanted.job is None:
        return published_job(read_profile(name))
    job = job_of(wanted.job)
    spec, profile = job.spec, JobProfiles(job).read(name)
    for warning in check_profiles({name: profile}, job):
        print(f"warning: {warning}", file=sys.stderr)
    if spec.worker.devices > 1:
        raise SimulationError(
            f"{wanted.job}: expected spec.worker.devices 1 with `bamboo compare`, whose nodes have one GPU each,"
            f" got {spec.worker.devices}"
        )
    spot, on_demand = (pool_price(spec.node_pools, capacity) for capacity in (Capacity.SPOT, Capacity.ON_DEMAND))
    if spot is not None and on_demand is not None:
        profile = msgspec.structs.replace(profile, prices=Prices(spot=spot, on_demand=on_demand))
    if profile.prices is None:
        raise SimulationError(
            f"{wanted.job}: expected pricePerHour in a node pool of each capacity, or prices in the profile {name}"
        )
    return own_job(profile, spec, job.document)


def runs(wanted: Comparison) -> int:
    """How many there will be."""
    cases = 1 if wanted.traces else len(wanted.rates) * len(wanted.seeds)
    return cases * len(_strategies(wanted.strategies))


def _run(name: str, job: ComparedJob, trace: Trace, hours: float | None, done: Callable[[int], None]) -> StrategyResult:
    found = compared(name, job, trace, hours)
    done(1)
    return found


def _strategies(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in STRATEGIES:
            usage(f"--strategy must be one of {', '.join(STRATEGIES)}, not {name[:40]!r}")
    return tuple(dict.fromkeys(names)) or STRATEGIES


def _cases(wanted: Comparison, nodes: int) -> list[tuple[str, list[Trace]]]:
    if wanted.traces:
        name = ",".join(os.path.basename(path) for path in wanted.traces)
        return [(name, [read_nodes(wanted.traces)])]
    hours = wanted.hours or HOURS
    return [
        (
            f"{rate:g}",
            [
                generate(Generation(nodes=nodes, hours=hours, removal=rate, addition=wanted.replace_rate), seed)
                for seed in wanted.seeds
            ],
        )
        for rate in wanted.rates
    ]
