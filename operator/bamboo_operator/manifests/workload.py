"""The Workload by which a job asks Kueue for its workers. Equal arguments give the same one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from bamboo_core import names
from bamboo_core.job.node_placement import placement
from bamboo_core.job.spec import JobSpec
from bamboo_operator.manifests.template import asked_spec
from bamboo_operator.manifests.worker_pod import MANAGED_BY, JobMeta, WorkerPodSettings, owner, worker_pod

Json = dict[str, Any]

WORKERS: Final = "workers"  # the pod set of workers that run stages
STANDBY: Final = "standby"  # that of spare ones, if there are any
SHAPE: Final = f"{names.GROUP}/workload-shape"  # an annotation: a digest of all but the seats
ELASTIC: Final = f"{names.KUEUE}/elastic-job"  # an annotation: a smaller or larger one may take its place
REPLACES: Final = f"{names.KUEUE}/workload-slice-replacement-for"  # an annotation: namespace/name of that other one
INSTEAD_OF: Final = f"{names.GROUP}/workload-instead-of"  # an annotation: that one's name, where both hold quota first
SLICE_NAME: Final = f"{names.KUEUE}/workload-slice-name"  # an annotation: the name of the first one of them
LONGEST_NAME: Final = 40  # of a job, in the name of its Workload

# Of a pod what Kueue goes by: the rest is not in a Workload, so that no edit of it asks for another one.
_COUNTED_SPEC = ("nodeSelector", "tolerations", "priorityClassName", "runtimeClassName", "overhead", "resources")


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority:
    """The priority with which a job waits, and the class that it has it of."""

    group: str
    kind: str
    name: str
    value: int


def priority_class(job: JobSpec) -> tuple[str, str, str] | None:
    """Group, kind and name of the class that says how important the job is; None if none does."""
    if job.queue is not None and job.queue.priority_class is not None:
        return names.KUEUE, "WorkloadPriorityClass", job.queue.priority_class
    template = job.worker.template.get("spec")
    name = template.get("priorityClassName") if isinstance(template, Mapping) else None
    return ("scheduling.k8s.io", "PriorityClass", name) if isinstance(name, str) and name else None


def pod_sets(job: JobSpec, meta: JobMeta, settings: WorkerPodSettings, seats: int, least: int | None) -> list[Json]:
    """The pods that are asked for. least: admitted with fewer workers, down to these; None: as a whole."""
    template = _template(job, meta, settings)
    workers: Json = {"name": WORKERS, "count": seats, "template": template}
    if least is not None:
        workers["minCount"] = least
    spare = {"name": STANDBY, "count": job.standby.workers, "template": template}
    return [workers, spare] if job.standby.workers else [workers]


def shape(job: JobSpec, meta: JobMeta, settings: WorkerPodSettings) -> str:
    """A digest, 10 hex digits, of what is asked for beside the number of seats."""
    asked = [pod_sets(job, meta, settings, 1, None), priority_class(job)]
    return sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:10]


def workload_name(job: JobSpec, meta: JobMeta, number: int) -> str:
    """The name of a job's so manieth Workload."""
    digest = sha256(meta.uid.encode()).hexdigest()[:5]
    return f"bamboo-{job.name[:LONGEST_NAME].rstrip('-')}-{digest}-{number}"


def workload(
    job: JobSpec,
    meta: JobMeta,
    version: str,
    number: int,
    sets: list[Json],
    priority: Priority | None,
    annotations: Mapping[str, str],
) -> Json:
    """A Workload of the job, which is in a queue. version: the API's. number: it is the so manieth."""
    assert job.queue is not None
    spec: Json = {"queueName": job.queue.name, "podSets": sets}
    if priority is not None:
        spec["priorityClassRef"] = {"group": priority.group, "kind": priority.kind, "name": priority.name}
        spec["priority"] = priority.value
    return {
        "apiVersion": f"{names.KUEUE}/{version}",
        "kind": "Workload",
        "metadata": {
            "name": workload_name(job, meta, number),
            "namespace": job.namespace,
            "labels": {
                "app.kubernetes.io/managed-by": MANAGED_BY,
                names.LABEL_JOB_NAME: job.name,
                f"{names.KUEUE}/job-uid": meta.uid,
            },
            "annotations": dict(annotations),
            "ownerReferences": [owner(job.name, meta.uid)],
        },
        "spec": spec,
    }


def _template(job: JobSpec, meta: JobMeta, settings: WorkerPodSettings) -> Json:
    """The pod as far as Kueue goes by it. Of several pools it may choose: it knows of no nodes but those of flavors,
    and their taints are tolerated.
    """
    pools = job.node_pools
    spec = worker_pod(job, meta, 0, pools[0] if len(pools) == 1 else None, settings)["spec"]
    kept: Json = {key: spec[key] for key in _COUNTED_SPEC if spec.get(key)}
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if required:
        kept["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    tolerations = list(kept.get("tolerations") or ())
    for pool in pools:
        asked = (*(asked_spec(job, pool).get("tolerations") or ()), *placement(job, pool).tolerations)
        tolerations += [dict(one) for one in asked if one not in tolerations]
    if tolerations:
        kept["tolerations"] = tolerations
    for group in ("initContainers", "containers"):
        if spec.get(group):
            kept[group] = [_container(one) for one in spec[group]]
    return {"metadata": {}, "spec": {**kept, "restartPolicy": "Never"}}


def _container(one: Mapping[str, Any]) -> Json:
    return {key: one[key] for key in ("name", "resources", "restartPolicy") if one.get(key)}
