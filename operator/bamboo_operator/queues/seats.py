"""How many workers a job asks its queue for, and what it is to do with fewer. Pure.

A seat is the queue's leave to have one worker's pod. It stays the job's when that worker is lost or leaves.
"""

from dataclasses import dataclass, replace

from bamboo_core.job.spec import ElasticSpec, JobSpec, fewest_workers, wanted_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatBounds:
    """The seats that a job asks for. least, most: for workers that run stages; step: those of a pipeline, which is how
    the job grows and shrinks. unit: any number of them that the job can use is a multiple of it. standby: for spare
    workers, beside these.
    """

    least: int
    most: int
    step: int
    unit: int
    standby: int

    def usable(self, seats: int) -> int:
        """How many of these seats the job can use."""
        return min(seats, self.most) // self.unit * self.unit


def seat_bounds(spec: JobSpec) -> SeatBounds:
    standby, step = spec.standby.workers, spec.topology.stages
    most = wanted_workers(spec) - standby
    unit = 1 if spec.elastic.chooses_grid else step
    return SeatBounds(least=min(most, fewest_workers(spec)), most=most, step=step, unit=unit, standby=standby)


def fitted(spec: JobSpec, seats: int) -> JobSpec:
    """The job as it is trained with so many workers that run stages, at least one; itself if it asks for no more."""
    if seats >= seat_bounds(spec).most:
        return spec
    elastic, topology = spec.elastic, spec.topology
    if not elastic.chooses_grid:
        pipelines = max(1, seats // topology.stages)
        bounds = _at_most(elastic, pipelines)
        return replace(spec, elastic=bounds, topology=replace(topology, pipelines=min(topology.pipelines, pipelines)))
    bounds = replace(_at_most(elastic, max(1, seats // elastic.min_stages)), max_workers=seats)
    guess = min(topology.pipelines, max(1, seats // topology.stages))
    return replace(spec, elastic=bounds, topology=replace(topology, pipelines=guess))


def _at_most(elastic: ElasticSpec, pipelines: int) -> ElasticSpec:
    low, high = min(elastic.min_pipelines, pipelines), min(elastic.max_pipelines, pipelines)
    return replace(elastic, min_pipelines=low, max_pipelines=high)
