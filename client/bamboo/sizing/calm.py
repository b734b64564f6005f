"""Cost of a candidate while nothing is lost: memory, time and money of a step. Pure; no coordinator is run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from bamboo.simulation.job.job_zones import packed
from bamboo.simulation.job.zone_traffic import step_traffic, traffic_usd
from bamboo.sizing.pareto import Point
from bamboo.sizing.trials.candidate import Candidate, job_of, on_its_grid
from bamboo.sizing.trials.world import World
from bamboo_core.job.spec import JobSpec, pod_spread
from bamboo_core.planning.grid import initial_plan, layer_ranges
from bamboo_core.planning.plan import Peer, Plan
from bamboo_core.planning.profile import ModelProfile, for_microbatch
from bamboo_core.planning.splits.devices import device_layers
from bamboo_core.planning.splits.uneven_split import Ranges
from bamboo_core.planning.steps.fitting_split import fitting_split
from bamboo_core.planning.steps.step_times import StepModel
from bamboo_core.planning.steps.worker_memory import most_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Calm:
    """The cost of an undisturbed step: its seconds; bytes that cross zones; USD, of nodes and of those bytes."""

    seconds: float
    between_zones: float
    usd: float

    @property
    def point(self) -> Point:
        return self.seconds, self.usd


def memory_needed(world: World, candidate: Candidate) -> int:
    """Return the device bytes of the worker that needs most, also while it runs the stages of lost neighbours."""
    made = job_of(candidate, world.spec, world.document)
    assert made is not None
    profile = for_microbatch(world.machines[candidate.machine].profile, candidate.micro_batch)
    spec = on_its_grid(candidate, made[0])
    return most_bytes(profile.figures, spec, _split(spec, profile))


def calm(world: World, candidate: Candidate) -> Calm:
    """Return the cost of an undisturbed step of a valid candidate."""
    made = job_of(candidate, world.spec, world.document)
    assert made is not None
    profile = for_microbatch(world.machines[candidate.machine].profile, candidate.micro_batch)
    spec = on_its_grid(candidate, made[0])
    plan = _plan(spec, profile, world.market.zones, packs=pod_spread(made[0]).packs)
    billed = step_traffic(plan, plan.target, profile).billed
    seconds = StepModel(profile.figures, spec).seconds(plan, plan.target)
    usd = seconds * node_usd(world, candidate) + traffic_usd(billed, world.traffic_price)
    return Calm(seconds=seconds, between_zones=billed, usd=usd)


def node_usd(world: World, candidate: Candidate) -> float:
    """Return the USD of all nodes of a candidate for a second, at mean prices over time and zones."""
    prices = world.machines[candidate.machine].profile.prices
    spot = world.spot_usd(candidate.machine)
    on_demand = prices.on_demand if prices else 1.0
    dear, nodes = candidate.on_demand or 0, world.spec.spread.nodes
    return (nodes(candidate.workers - dear) * spot + nodes(dear) * on_demand) / 3600


def least(world: World, candidate: Candidate) -> Point:
    """Return a lower bound of a step's seconds and USD: the busiest stage's work, the earlier stages' for the first
    microbatch, and the way back of the last one.
    """
    profile = for_microbatch(world.machines[candidate.machine].profile, candidate.micro_batch)
    spec, devices = world.spec, world.spec.worker.devices
    topology = replace(spec.topology, stages=candidate.stages, pipelines=candidate.pipelines)
    stages = layer_ranges(profile.costs, topology, devices=devices)
    ranges = device_layers(spec, stages, profile.costs) or stages
    both = [sum(layer.forward + layer.backward for layer in profile.layers[a:b]) for a, b in ranges]
    share = -(-(spec.training.global_batch_size // candidate.micro_batch) // candidate.pipelines)
    seconds = max(sum(both[:stage]) + share * own for stage, own in enumerate(both))
    return seconds, seconds * node_usd(world, candidate)


def _split(spec: JobSpec, profile: ModelProfile) -> Ranges:
    """Return the layers of each stage; where the coordinator chooses the grid, the split respects memory."""
    fitting = fitting_split(profile.figures, spec, profile.machine.memory) if spec.elastic else None
    return fitting or layer_ranges(profile.costs, spec.topology, devices=spec.worker.devices)


def _plan(spec: JobSpec, profile: ModelProfile, zones: Sequence[str], *, packs: bool) -> Plan:
    """Return the plan of the job with its requested nodes in each zone. packs: whether pods are packed into zones."""
    count = spec.topology.stages * spec.topology.pipelines
    names = zones or ("",)
    if packs:
        places = [zone for zone, share in packed(names, spec).items() for _ in range(share)]
    else:
        places = [names[i % len(names)] for i in range(count)]
    peers = [Peer(worker=f"w{i}", host="", port=0, zone=zone) for i, zone in enumerate(places)]
    ranges = _split(spec, profile)
    plan = initial_plan(
        peers,
        ranges,
        spec.topology.pipelines,
        spec.training,
        spec.redundancy,
        spread=spec.spread.policy,
        schedule=spec.topology.first_schedule,
    )
    return msgspec.structs.replace(plan, device_layers=device_layers(spec, ranges, profile.costs))
