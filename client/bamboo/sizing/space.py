"""Space of candidates: grids, and the ways to protect one. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bamboo.sizing.trials.candidate import PROTECTION, Candidate, has_pools_for_a_share
from bamboo.sizing.trials.world import World
from bamboo_core.job.placement_spec import SpreadPolicy
from bamboo_core.job.spec import MOST_REPLICAS, MOST_STAGES, JobSpec, RedundancyMode, fewest_stages
from bamboo_core.planning.grid import make_layout

SHARES: Final = (0.25, 0.5)  # of workers, on demand
INTERVALS: Final = (0.25, 4.0)  # of checkpoints, times the job's
MOST_PIPELINES: Final = 1024
MICROBATCHES: Final = (0.5, 1.0, 2.0)  # times the profile's and the job's


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of candidates."""

    nodes: int  # at most at once, one for each worker
    # stages, pipelines, micro_batches, standby: only these; (): all that make sense
    stages: tuple[int, ...] = ()
    pipelines: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()
    standby: tuple[int, ...] = ()


def grids(world: World, limits: Limits, like: Candidate) -> Iterator[Candidate]:
    """Return the candidates on all machines and grids, in all placements, with the other protection of `like` and as
    many of its standbys as there are nodes for. Traffic between zones may cost more than all nodes, so each placement
    is a candidate. Of the numbers of pipelines with the same largest share of a step only the least counts: more are
    not faster.

    Where the coordinator chooses the grid, only grids that it may choose.
    """
    bounds = grid_bounds(world.spec)
    for name, machine in world.machines.items():
        layers = len(machine.profile.layers)
        for micro_batch in _micro_batches(world.spec, machine.profile.samples, limits):
            training = replace(world.spec.training, micro_batch_size=micro_batch)
            for stages in _stages(world.spec, layers // world.spec.worker.devices, limits, bounds):
                for pipelines in _pipelines(training.microbatches, training.groups, limits, stages, bounds):
                    standby = min(like.standby, limits.nodes - stages * pipelines)
                    if standby >= min(limits.standby, default=0):
                        one = replace(
                            like,
                            machine=name,
                            stages=stages,
                            pipelines=pipelines,
                            micro_batch=micro_batch,
                            standby=standby,
                        )
                        yield from (replace(one, spread=spread) for spread in _spreads(world, one))


@dataclass(frozen=True, slots=True, kw_only=True)
class GridBounds:
    min_stages: int = 1
    max_stages: int = MOST_STAGES
    min_pipelines: int = 1
    max_pipelines: int = MOST_PIPELINES


def grid_bounds(spec: JobSpec) -> GridBounds:
    """Return the bounds of a grid that the coordinator chooses; a fixed grid has none, since another one may be
    recommended.
    """
    topology = spec.topology
    if spec.elastic is None:
        return GridBounds()
    return GridBounds(
        min_stages=fewest_stages(spec),
        max_stages=MOST_STAGES if topology.chooses_stages else topology.stages,
        min_pipelines=topology.pipelines,
        max_pipelines=MOST_PIPELINES if topology.chooses_pipelines else topology.pipelines,
    )


def protections(world: World, limits: Limits, one: Candidate) -> Iterator[Candidate]:
    """Return the candidate with one change of its protection, or of the protection's cost."""
    for mode in RedundancyMode:
        known = mode in (RedundancyMode.AUTO, one.redundancy.mode)
        if not known and (mode is not RedundancyMode.NONE or one.pipelines > 1):
            yield replace(one, mode=mode, replicas=1 if mode is RedundancyMode.NONE else one.replicas)
    if one.redundancy.kept:
        for replicas in range(1, min(MOST_REPLICAS, max(1, one.stages - 1)) + 1):
            yield replace(one, replicas=replicas)
    cells = one.stages * one.pipelines
    for standby in limits.standby or sorted({0, 1, 2, -(-cells // 16), -(-cells // 8)}):
        if cells + standby <= limits.nodes:
            yield _within_shares(replace(one, standby=standby))
    for spread in _spreads(world, one):
        yield replace(one, spread=spread)
    if one.every_steps is not None:
        for every in _intervals(one.every_steps):
            yield replace(one, every_steps=every)
    if has_pools_for_a_share(world.spec):
        for share in SHARES:
            if 0 < (count := round(share * one.workers)) < one.workers:
                yield replace(one, on_demand=count)


def smaller(one: Candidate) -> Iterator[Candidate]:
    """Yield the candidate, then versions that take less memory: one replica, then none."""
    yield one
    if one.mode is not RedundancyMode.NONE:
        if one.replicas > 1:
            yield replace(one, replicas=1)
        yield replace(one, mode=RedundancyMode.NONE, replicas=1)


def combined(base: Candidate, changed: Sequence[Candidate]) -> Candidate:
    """Return the base with the changes of each of the others; later ones win."""
    found = base
    for other in changed:
        for name in PROTECTION:
            if getattr(other, name) != getattr(base, name):
                found = replace(found, **{name: getattr(other, name)})
    return _within_shares(found)


def _spreads(world: World, one: Candidate) -> Sequence[SpreadPolicy]:
    """Return the spread policies to try. With one pipeline ZonePerPipeline is SingleZone."""
    if len(world.market.zones) < 2:
        return (one.spread,)
    known = (SpreadPolicy.INTERLEAVE, SpreadPolicy.SINGLE_ZONE, SpreadPolicy.ZONE_PER_PIPELINE)
    return known if one.pipelines > 1 else known[:2]


def _within_shares(one: Candidate) -> Candidate:
    return replace(one, on_demand=None) if (one.on_demand or 0) >= one.workers else one


def _intervals(every: int) -> list[int]:
    return sorted({max(1, round(every * factor)) for factor in INTERVALS})


def _micro_batches(spec: JobSpec, measured: int, limits: Limits) -> list[int]:
    batch = spec.training.global_batch_size
    wanted = limits.micro_batches or {
        int(factor * size) for size in (measured, spec.training.micro_batch_size) for factor in MICROBATCHES
    }
    return sorted(size for size in wanted if size > 0 and batch % size == 0)


def _stages(spec: JobSpec, layers: int, limits: Limits, bounds: GridBounds) -> Sequence[int]:
    if spec.topology.split is not None:
        return (len(spec.topology.split),)
    wanted = limits.stages or range(bounds.min_stages, min(layers, bounds.max_stages) + 1)
    return [stages for stages in wanted if stages <= min(layers, limits.nodes, MOST_STAGES)]


def _pipelines(microbatches: int, groups: int | None, limits: Limits, stages: int, bounds: GridBounds) -> list[int]:
    most = min(limits.nodes // stages, groups or microbatches, MOST_PIPELINES)
    if limits.pipelines:
        return [count for count in limits.pipelines if count <= most]
    least: dict[int, int] = {}
    for count in range(bounds.min_pipelines, min(most, bounds.max_pipelines) + 1):
        largest = max(map(len, make_layout(0, microbatches, count, groups).split))
        least.setdefault(largest, count)
    return sorted(least.values())
