"""Estimates, without a simulation, of a candidate's memory and step time, and of its job's time and cost. Pure."""

import math
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from bamboo.simulation.job.job_zones import packed
from bamboo.simulation.job.zone_traffic import step_traffic, traffic_usd
from bamboo.sizing.pareto import Point
from bamboo.sizing.trials.candidate import Candidate, on_its_grid
from bamboo.sizing.trials.world import HOUR, World
from bamboo_core.job.placement_spec import Capacity, pool_price
from bamboo_core.job.spec import JobSpec, pod_spread
from bamboo_core.planning.grid import initial_plan, layer_ranges
from bamboo_core.planning.plan import Peer, Plan
from bamboo_core.planning.profile import ModelProfile, for_microbatch
from bamboo_core.planning.splits.device_stages import device_layers
from bamboo_core.planning.splits.speeds import Ranges
from bamboo_core.planning.steps.step_times import StepModel
from bamboo_core.planning.steps.worker_memory import fitting_split, most_bytes

REPEATED: Final = 1.5  # steps that a loss without notice costs, about


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The estimated time and cost of a candidate's step and whole job."""

    candidate: Candidate
    seconds: float  # of an undisturbed step
    traffic: float  # USD of an undisturbed step for the bytes that cross zones
    # hours, usd: of the whole job with the mean number of missing nodes; infinite if it never ends
    hours: float
    usd: float

    @property
    def point(self) -> Point:
        return self.hours, self.usd


def memory_needed(world: World, candidate: Candidate) -> int:
    """Return the most bytes that a device needs at any time, even while its worker runs a lost neighbour's stage."""
    profile, spec = _profile(world, candidate), on_its_grid(candidate, world.spec)
    return most_bytes(profile.figures, spec, _split(spec, profile))


def least_seconds(world: World, candidate: Candidate) -> float:
    """Return a lower bound on a step's seconds, without the time of communication.

    It is the maximum over the stages of a stage's work on all its microbatches plus the earlier stages' work on one.
    """
    profile, spec = _profile(world, candidate), world.spec
    devices = spec.worker.devices
    topology = replace(spec.topology, stages=candidate.stages, pipelines=candidate.pipelines)
    stages = layer_ranges(profile.costs, topology, devices=devices)
    ranges = device_layers(spec, stages, profile.costs) or stages
    both = [sum(layer.forward + layer.backward for layer in profile.layers[a:b]) for a, b in ranges]
    share = -(-(spec.training.global_batch_size // candidate.micro_batch) // candidate.pipelines)
    return max(sum(both[:stage]) + share * own for stage, own in enumerate(both))


def step_seconds(world: World, candidate: Candidate) -> float:
    """Return the seconds of an undisturbed step, which do not depend on the workers' zones."""
    profile, spec = _profile(world, candidate), on_its_grid(candidate, world.spec)
    plan = _plan(world, candidate)
    return StepModel(profile.figures, spec).seconds(plan, plan.target)


def traffic_of_step(world: World, candidate: Candidate) -> float:
    """Return the cost, in USD, of the bytes that cross zones in an undisturbed step."""
    plan = _plan(world, candidate)
    return traffic_usd(step_traffic(plan, plan.target, _profile(world, candidate)), world.traffic_price)


def node_usd(world: World, candidate: Candidate) -> float:
    """Return the USD per hour of all nodes of a candidate at the spot price."""
    return world.spec.spread.nodes(candidate.workers) * world.spot_usd(candidate.machine)


def estimate(world: World, candidate: Candidate, seconds: float, traffic: float) -> Estimate:
    """Estimate the hours and USD of a candidate's whole job. seconds, traffic (USD): of an undisturbed step.

    Missing spot nodes slow the job down, unless nodes of an on-demand pool with a price replace them.
    """
    workers, calm = candidate.workers, world.steps * seconds / HOUR
    spot = world.market.availability(workers, calm)
    dear = world.spec.spread.node_price(pool_price(world.spec.node_pools, Capacity.ON_DEMAND))
    speed = 1.0 if dear is not None else sum(share * _speed(world.spec, candidate, nodes) for share, nodes in spot)
    repeated = world.machines[candidate.machine].profile.times.detection + REPEATED * seconds
    slower = 1 + world.market.losses_per_hour(workers) * repeated / HOUR
    hours = calm * slower / speed if speed else math.inf
    present = sum(share * nodes for share, nodes in spot) / workers
    price = present * world.spot_usd(candidate.machine) + (1 - present) * (dear or 0.0)
    usd = hours * world.spec.spread.nodes(workers) * price + world.steps * traffic
    return Estimate(candidate=candidate, seconds=seconds, traffic=traffic, hours=hours, usd=usd)


def _speed(spec: JobSpec, one: Candidate, nodes: int) -> float:
    """Return the speed with `nodes` nodes, as a share of the whole grid's; 0 if over half of a fixed grid is missing.

    A lost stage's neighbour runs it in addition to its own, which halves the pipeline's speed; without replicas the
    pipeline is lost. If the coordinator chooses the grid, the speed is proportional to the nodes, however few.
    """
    cells = one.stages * one.pipelines
    missing = max(0, cells - nodes)
    if spec.elastic:
        return nodes / cells if missing else 1.0
    if 2 * missing > cells:
        return 0.0
    return 1 - min(missing, one.pipelines) / one.pipelines * (0.5 if one.redundancy.kept else 1.0)


def _profile(world: World, candidate: Candidate) -> ModelProfile:
    return for_microbatch(world.machines[candidate.machine].profile, candidate.micro_batch)


def _split(spec: JobSpec, profile: ModelProfile) -> Ranges:
    """Return each stage's range of layers. In an elastic job it is one that fits in memory, if one is found."""
    fitting = fitting_split(profile.figures, spec, profile.machine.memory) if spec.elastic else None
    return fitting or layer_ranges(profile.costs, spec.topology, devices=spec.worker.devices)


def _plan(world: World, candidate: Candidate) -> Plan:
    """Return the plan of the candidate's job, with workers in the zones where its spread policy places them."""
    profile, spec = _profile(world, candidate), on_its_grid(candidate, world.spec)
    names = world.market.zones or ("",)
    if pod_spread(replace(world.spec, spread=spec.spread)).packs:
        places = [zone for zone, share in packed(names, spec).items() for _ in range(share)]
    else:
        places = [names[i % len(names)] for i in range(candidate.stages * candidate.pipelines)]
    ranges = _split(spec, profile)
    plan = initial_plan(
        [Peer(worker=f"w{i}", host="", port=0, zone=zone) for i, zone in enumerate(places)],
        ranges,
        spec.topology.pipelines,
        spec.training,
        spec.redundancy,
        spread=spec.spread.policy,
        schedule=spec.topology.first_schedule,
    )
    return msgspec.structs.replace(plan, device_layers=device_layers(spec, ranges, profile.costs))
