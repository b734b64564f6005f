"""Candidates for a job: a machine, a grid and its redundancy, and the edits of the manifest that set them. Pure.

The global batch, the microbatch size times the number of microbatches, never changes.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from bamboo_core.job.manifest import ManifestError, parse_manifest
from bamboo_core.job.placement_spec import SpreadPolicy
from bamboo_core.job.spec import JobSpec, RedundancyMode, RedundancySpec

Path = tuple[str, ...]
Edits = Mapping[Path, Any]  # new values by their paths in the manifest


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
    spread: SpreadPolicy

    @property
    def workers(self) -> int:
        """The number of workers, with standbys."""
        return self.stages * self.pipelines + self.standby

    @property
    def redundancy(self) -> RedundancySpec:
        """The redundancy in force on this grid, with mode Auto resolved."""
        return RedundancySpec(mode=self.mode, replicas=self.replicas).on(self.pipelines)


def as_the_job_is(machine: str, spec: JobSpec) -> Candidate:
    return Candidate(
        machine=machine,
        stages=spec.topology.stages,
        pipelines=spec.topology.pipelines,
        micro_batch=spec.training.micro_batch_size,
        mode=spec.redundancy.mode,
        replicas=spec.redundancy.replicas,
        standby=spec.standby.workers,
        spread=spec.spread.policy,
    )


def edits(candidate: Candidate, spec: JobSpec) -> dict[Path, Any]:
    """Return the values to change in the job's manifest so that it describes the candidate, by path.

    Stages or pipelines that the coordinator chooses stay open; an elastic grid's size sets maxWorkers, caps minWorkers.
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
    return {("spec", *path): new for path, (new, old) in wanted.items() if new != old}


def on_its_grid(candidate: Candidate, spec: JobSpec) -> JobSpec:
    """Return the job with the candidate's settings and a fixed grid."""
    topology = replace(
        spec.topology,
        stages=candidate.stages,
        pipelines=candidate.pipelines,
        chooses_stages=False,
        chooses_pipelines=False,
    )
    return replace(
        spec,
        topology=topology,
        training=replace(spec.training, micro_batch_size=candidate.micro_batch),
        redundancy=replace(spec.redundancy, mode=candidate.mode, replicas=candidate.replicas),
        standby=replace(spec.standby, workers=candidate.standby),
        spread=replace(spec.spread, policy=candidate.spread),
    )


def edited(document: Mapping[str, Any], changes: Edits) -> dict[str, Any]:
    """Return a copy of the manifest with these values set; missing objects on their paths are added."""
    found = deepcopy(dict(document))
    for path, value in changes.items():
        inner: Any = found
        for step in path[:-1]:
            if inner.get(step) is None:
                inner[step] = {}
            inner = inner[step]
        inner[path[-1]] = value
    return found


def job_of(candidate: Candidate, spec: JobSpec, document: Mapping[str, Any]) -> tuple[JobSpec, dict[str, Any]] | None:
    """Return the candidate's job with its manifest; None if the manifest's rules do not allow it."""
    made = edited(document, edits(candidate, spec))
    try:
        return parse_manifest(made), made
    except ManifestError:
        return None
