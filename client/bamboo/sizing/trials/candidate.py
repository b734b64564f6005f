"""Candidates: a machine, a grid and its protection, and the edits of a manifest that they mean. Pure.

The global batch, and so microbatch x microbatches, never changes.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from bamboo_core.job.manifest import ManifestError, parse_manifest
from bamboo_core.job.placement_spec import Capacity, SpreadPolicy
from bamboo_core.job.spec import USUAL_STEPS, CheckpointSpec, JobSpec, RedundancyMode, RedundancySpec

Path = tuple[str | int, ...]
Edits = Mapping[Path, Any]  # values by their places in the manifest
# What may differ between candidates of one grid.
PROTECTION = ("mode", "replicas", "standby", "every_steps", "on_demand", "spread")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A machine, a grid and its protection for a job."""

    machine: str  # its name in the price file
    stages: int
    pipelines: int
    micro_batch: int
    mode: RedundancyMode
    replicas: int
    standby: int
    every_steps: int | None  # from one checkpoint to the next; None without checkpoints
    on_demand: int | None  # workers on nodes on demand; None: pools are as the job has them
    spread: SpreadPolicy

    def __lt__(self, other: "Candidate") -> bool:
        """Compare the fields in their order; None comes before any value."""
        return self._order < other._order

    @property
    def _order(self) -> tuple[Any, ...]:
        values = (getattr(self, name) for name in Candidate.__slots__)
        return tuple((value is not None, 0 if value is None else value) for value in values)

    @property
    def workers(self) -> int:
        """Return the number of workers, standby included."""
        return self.stages * self.pipelines + self.standby

    @property
    def redundancy(self) -> RedundancySpec:
        """Return the redundancy in force, with a mode that is not Auto."""
        return RedundancySpec(mode=self.mode, replicas=self.replicas).on(self.pipelines)

    @property
    def grid(self) -> tuple[str, int, int, int]:
        return self.machine, self.stages, self.pipelines, self.micro_batch


def as_the_job_is(machine: str, spec: JobSpec) -> Candidate:
    return Candidate(
        machine=machine,
        stages=spec.topology.stages,
        pipelines=spec.topology.pipelines,
        micro_batch=spec.training.micro_batch_size,
        mode=spec.redundancy.mode,
        replicas=spec.redundancy.replicas,
        standby=spec.standby.workers,
        every_steps=_interval(spec.checkpoint) if spec.checkpoint else None,
        on_demand=None,
        spread=spec.spread.policy,
    )


def edits(candidate: Candidate, spec: JobSpec, document: Mapping[str, Any]) -> dict[Path, Any]:
    """Return the necessary edits of the job's manifest.

    The coordinator still chooses what it may of the grid, for the candidate's number of workers.
    """
    topology, elastic = spec.topology, spec.elastic
    wanted: dict[Path, tuple[Any, Any]] = {
        ("training", "microBatchSize"): (candidate.micro_batch, spec.training.micro_batch_size),
        ("redundancy", "mode"): (candidate.mode.value, spec.redundancy.mode.value),
        ("redundancy", "replicas"): (candidate.replicas, spec.redundancy.replicas),
        ("standby", "workers"): (candidate.standby, spec.standby.workers),
        ("spread", "policy"): (candidate.spread.value, spec.spread.policy.value),
    }
    if not topology.chooses_stages:
        wanted["topology", "stages"] = candidate.stages, topology.stages
    if not topology.chooses_pipelines:
        wanted["topology", "pipelines"] = candidate.pipelines, topology.pipelines
    if elastic:
        cells = candidate.stages * candidate.pipelines
        wanted["elastic", "maxWorkers"] = cells, elastic.max_workers
        wanted["elastic", "minWorkers"] = min(cells, elastic.min_workers), elastic.min_workers
    if candidate.every_steps is not None and spec.checkpoint is not None:
        wanted["checkpoint", "everySteps"] = candidate.every_steps, _interval(spec.checkpoint)
    found = {("spec", *path): new for path, (new, old) in wanted.items() if new != old}
    return found | _pools(candidate, spec)


def on_its_grid(candidate: Candidate, spec: JobSpec) -> JobSpec:
    """Return the job on the candidate's grid, fixed."""
    grid = replace(
        spec.topology,
        stages=candidate.stages,
        pipelines=candidate.pipelines,
        chooses_stages=False,
        chooses_pipelines=False,
    )
    return replace(spec, topology=grid)


def has_pools_for_a_share(spec: JobSpec) -> bool:
    """Return whether the job has one pool of each capacity, whose limits then make a share."""
    kinds = sorted(pool.capacity.value for pool in spec.node_pools)
    return kinds == [Capacity.ON_DEMAND.value, Capacity.SPOT.value]


def _pools(candidate: Candidate, spec: JobSpec) -> dict[Path, Any]:
    """Return both pools with limits; workers on demand are requested from the beginning."""
    if candidate.on_demand is None:
        return {}
    found: dict[Path, Any] = {}
    for number, pool in enumerate(spec.node_pools):
        place: Path = ("spec", "nodePools", number)
        spot = pool.capacity is Capacity.SPOT
        limit = candidate.workers - candidate.on_demand if spot else candidate.on_demand
        if pool.max_workers != limit:
            found[*place, "maxWorkers"] = limit
        if not spot and pool.after_seconds:
            found[*place, "afterSeconds"] = 0
    return found


def edited(document: Mapping[str, Any], changes: Edits) -> dict[str, Any]:
    """Return the manifest with these values; missing objects are added."""
    found = deepcopy(dict(document))
    for path, value in changes.items():
        inner: Any = found
        for step in path[:-1]:
            if isinstance(inner, dict) and inner.get(step) is None:
                inner[step] = {}
            inner = inner[step]
        inner[path[-1]] = value
    return found


def job_of(candidate: Candidate, spec: JobSpec, document: Mapping[str, Any]) -> tuple[JobSpec, dict[str, Any]] | None:
    """Return the candidate's job with its manifest; None if the manifest's rules do not allow it."""
    made = edited(document, edits(candidate, spec, document))
    try:
        return parse_manifest(made), made
    except ManifestError:
        return None


def _interval(checkpoint: CheckpointSpec) -> int:
    """Return the steps between checkpoints, or the longest interval that the coordinator takes if the manifest has
    none.
    """
    return checkpoint.every_steps or USUAL_STEPS
