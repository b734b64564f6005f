"""What of an edited spec a running job takes over, and what of it is fixed from its beginning to its end."""

import json
from dataclasses import replace
from hashlib import sha256

from bamboo.spec import JobSpec

CHANGEABLE = (  # beside topology.pipelines and redundancy.mode
    "suspend", "elastic", "standby", "node_pools", "clean_pod_policy", "ttl_seconds_after_finished",
    "active_deadline_seconds", "progress_deadline_seconds",
)  # fmt: skip


def taken_over(old: JobSpec, wanted: JobSpec) -> JobSpec:
    """The spec in force from now on. If it is not `wanted`, the edit asks for what cannot be."""
    topology = replace(old.topology, pipelines=wanted.topology.pipelines)
    redundancy = replace(old.redundancy, mode=wanted.redundancy.mode)
    changed = {name: getattr(wanted, name) for name in CHANGEABLE}
    return replace(old, topology=topology, redundancy=redundancy, **changed)


def task_digest(spec: JobSpec) -> str:
    """Of what the model is made from, as its user wrote it: no default is in it, which another version could change."""
    task = [spec.task.entrypoint, dict(spec.task.config)]
    return sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()[:16]
