"""Space of candidates: grids of all machines, their modes of redundancy, placements and standbys. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bamboo.sizing.trials.candidate import Candidate, as_the_job_is
from bamboo.sizing.trials.world import World
from bamboo_core.job.placement_spec import SpreadPolicy
from bamboo_core.job.spec import MOST_STAGES, JobSpec, RedundancyMode, fewest_stages
from bamboo_core.planning.grid import make_layout

MOST_PIPELINES: Final = 1024
MICROBATCHES: Final = (0.5, 1.0, 2.0)  # times the profile's and the job's
STANDBYS: Final = (0.0, 0.125, 0.25, 0.5, 0.75)  # times the workers that run stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The user's limits on the candidates."""

    nodes: int  # the most workers at once: nodes, times the workers on each
    # stages, pipelines, micro_batches, standby: only these; (): all that make sense
    stages: tuple[int, ...] = ()
    pipelines: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()
    standby: tuple[int, ...] = ()


def grids(world: World, limits: Limits) -> Iterator[Candidate]:
    """Yield a candidate for each machine, grid and microbatch size: the job's other settings, but no standbys.

    Unless limits.pipelines is set, a number of pipelines is skipped if a smaller number gives the busiest pipeline as
    few microbatches, since more pipelines would not be faster. If the coordinator chooses stages or pipelines and
    `limits` does not set them, the candidates have only numbers that it may choose.
    """
    stage_bounds, pipeline_bounds = _grid_bounds(world.spec)
    for name, machine in world.machines.items():
        like, layers = as_the_job_is(name, world.spec), len(machine.profile.layers)
        for micro_batch in _micro_batches(world.spec, machine.profile.samples, limits):
            training = replace(world.spec.training, micro_batch_size=micro_batch)
            for stages in _stages(world.spec, layers // world.spec.worker.devices, limits, stage_bounds):
                for pipelines in _pipelines(training.microbatches, training.groups, limits, stages, pipeline_bounds):
                    if stages * pipelines + min(limits.standby, default=0) <= limits.nodes:
                        yield replace(like, stages=stages, pipelines=pipelines, micro_batch=micro_batch, standby=0)


def _grid_bounds(spec: JobSpec) -> tuple[range, range]:
    """Return the ranges of the numbers of stages and of pipelines to search.
    An elastic job is limited to its coordinator's choice; a fixed grid is not, since another one may be better.
    """
    topology, fixed = spec.topology, spec.elastic is None
    most_stages = MOST_STAGES if fixed or topology.chooses_stages else topology.stages
    most_pipelines = MOST_PIPELINES if fixed or topology.chooses_pipelines else topology.pipelines
    first_stages, first_pipelines = (1, 1) if fixed else (fewest_stages(spec), topology.pipelines)
    return range(first_stages, most_stages + 1), range(first_pipelines, most_pipelines + 1)


def redundancies(one: Candidate) -> Iterator[Candidate]:
    """Yield the candidate, then versions that take less memory and traffic: one replica, then none."""
    yield one
    if one.redundancy.kept:
        if one.replicas > 1:
            yield replace(one, replicas=1)
        yield replace(one, mode=RedundancyMode.NONE, replicas=1)


def spreads(world: World, one: Candidate) -> Iterator[Candidate]:
    """Yield the candidate with each spread policy, or unchanged if the market has at most one zone.

    With one pipeline, ZonePerPipeline is left out, since it equals SingleZone.
    """
    known = (SpreadPolicy.INTERLEAVE, SpreadPolicy.SINGLE_ZONE, SpreadPolicy.ZONE_PER_PIPELINE)
    several = len(world.market.zones) > 1
    for spread in known[: 3 if one.pipelines > 1 else 2] if several else (one.spread,):
        yield replace(one, spread=spread)


def standbys(world: World, limits: Limits, one: Candidate) -> Iterator[Candidate]:
    """Yield the candidate with each number of standbys (`limits.standby`, or the job's and STANDBYS) that fits."""
    cells, wanted = one.stages * one.pipelines, world.spec.standby.workers
    for standby in limits.standby or sorted({wanted, *(round(share * cells) for share in STANDBYS)}):
        if cells + standby <= limits.nodes:
            yield replace(one, standby=standby)


def _micro_batches(spec: JobSpec, measured: int, limits: Limits) -> list[int]:
    batch = spec.training.global_batch_size
    wanted = limits.micro_batches or {
        int(factor * size) for size in (measured, spec.training.micro_batch_size) for factor in MICROBATCHES
    }
    return sorted(size for size in wanted if size > 0 and batch % size == 0)


def _stages(spec: JobSpec, layers: int, limits: Limits, bounds: range) -> Sequence[int]:
    if spec.topology.split is not None:
        return (len(spec.topology.split),)
    return [stages for stages in limits.stages or bounds if stages <= min(layers, limits.nodes, MOST_STAGES)]


def _pipelines(microbatches: int, groups: int, limits: Limits, stages: int, bounds: range) -> list[int]:
    most = min(limits.nodes // stages, groups, MOST_PIPELINES)
    if limits.pipelines:
        return [count for count in limits.pipelines if count <= most]
    least: dict[int, int] = {}
    for count in range(bounds.start, min(most + 1, bounds.stop)):
        largest = max(map(len, make_layout(0, microbatches, count, groups).split))
        least.setdefault(largest, count)
    return sorted(least.values())
