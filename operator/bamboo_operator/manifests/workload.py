"""The Workload by which a job asks Kueue for its workers. Equal arguments give the same one."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from bamboo_core import names
from bamboo_core.job.node_placement import placement
from bamboo_core.job.placement_spec import NodePool, SpreadPolicy
from bamboo_core.job.spec import JobSpec, pod_spread
from bamboo_operator.manifests.template import asked_spec
from bamboo_operator.manifests.worker_pod import MANAGED_BY, JobMeta, WorkerPodSettings, owner, worker_pod

Json = dict[str, Any]

WORKERS: Final = "workers"  # the pod set of workers that run stages; of further kinds workers-2 and so on
STANDBY: Final = "standby"  # that of spare ones, if there are any
SHAPE: Final = f"{names.GROUP}/workload-shape"  # an annotation: a digest of all but the seats
POOLS: Final = f"{names.GROUP}/workload-pools"  # an annotation: the pools of each pod set, such as a,b;c
ELASTIC: Final = f"{names.KUEUE}/elastic-job"  # an annotation: a smaller or larger one may take its place
REPLACES: Final = f"{names.KUEUE}/workload-slice-replacement-for"  # an annotation: namespace/name of that other one
INSTEAD_OF: Final = f"{names.GROUP}/workload-instead-of"  # an annotation: that one's name, where both hold quota first
WORKLOAD: Final = f"{names.KUEUE}/workload"  # an annotation of pods in assigned domains: the name of their Workload
UNCONSTRAINED: Final = f"{names.KUEUE}/podset-unconstrained-topology"  # another, without which Kueue counts them twice
POD_SET: Final = f"{names.KUEUE}/podset"  # a label of such pods
SLICE_NAME: Final = f"{names.KUEUE}/workload-slice-name"  # an annotation: the name of the first one of them
LONGEST_NAME: Final = 40  # of a job, in the name of its Workload

ANYWHERE: Final[Json] = {"unconstrained": True}  # of a topology's domains

# Of a pod what Kueue goes by: the rest is not in a Workload, so that no edit of it asks for another one.
_ASKED = ("priorityClassName", "runtimeClassName", "overhead", "resources")
_WHERE = ("nodeSelector", "tolerations")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatKind:
    """Workers whose pods ask for the same resources, in any of these pools. room: for how many the pools are; None: for
    any number.
    """

    pools: tuple[NodePool, ...]
    template: Json
    topology: Json | None  # what is asked of where those are that run stages; None: nothing
    room: int | None


def seat_kinds(job: JobSpec, meta: JobMeta, settings: WorkerPodSettings) -> tuple[SeatKind, ...]:
    """In the order of the pools; one if there are none."""
    alike: dict[str, list[NodePool]] = {}
    for pool in job.node_pools:
        asked = _asked(worker_pod(job, meta, 0, pool, settings)["spec"])
        alike.setdefault(json.dumps(asked, sort_keys=True), []).append(pool)
    found = []
    for pools in list(alike.values()) or [[]]:
        limits = [pool.max_workers for pool in pools if pool.max_workers is not None]
        room = sum(limits) if pools and len(limits) == len(pools) else None
        template, topology = _template(job, pools, meta, settings), _topology(job)
        found.append(SeatKind(pools=tuple(pools), template=template, topology=topology, room=room))
    return tuple(found)


def asked_kinds(kinds: Sequence[SeatKind], first: int) -> Sequence[SeatKind]:
    """Those that get seats if that is the first one to be asked for: the next ones only where pools may become full."""
    last = next((number for number, kind in enumerate(kinds) if number >= first and kind.room is None), len(kinds) - 1)
    return kinds[first : last + 1]


def kind_after(kinds: Sequence[SeatKind], waited: float) -> tuple[int, float]:
    """The first kind to be asked for by a job that has waited for seats for so many seconds, and in how many seconds
    another one is. A later one comes in place of those before, once its first pool's afterSeconds have passed.
    """
    later = {number: kind.pools[0].after_seconds for number, kind in enumerate(kinds) if number}
    first = max((number for number, after in later.items() if 0 < after <= waited), default=0)
    return first, min((after - waited for after in later.values() if after > waited), default=math.inf)


def rooms_of(kinds: Sequence[SeatKind], standby: int) -> list[int]:
    """For how many workers that run stages each kind has room, beside the spare ones, which are of the first kind; for
    `spread_seats`, which does not ask the last one.
    """
    rooms = [max(0, (kind.room or 0) - (0 if number else standby)) for number, kind in enumerate(kinds)]
    # Kueue never admits what its slices do not divide.
    sizes = [(kind.topology or {}).get("podSetSliceSize", 1) for kind in kinds]
    return [room - room % size for room, size in zip(rooms, sizes, strict=True)]


def spread_seats(seats: int, rooms: Sequence[int]) -> list[int]:
    """So many seats in pod sets that have room for so many, one after the other; the last takes what is left."""
    found = []
    for room in rooms[:-1]:
        found.append(min(seats, room))
        seats -= found[-1]
    return [*found, seats]


def pod_sets(kinds: Sequence[SeatKind], seats: int, *, least: int | None = None, standby: int = 0) -> list[Json]:
    """The pods that are asked for. least: admitted with fewer workers, down to these; None: as a whole."""
    counts = spread_seats(seats, rooms_of(kinds, standby))
    sets: list[Json] = [
        {"name": f"{WORKERS}-{number}" if number > 1 else WORKERS, "count": count, "template": kind.template}
        for number, (kind, count) in enumerate(zip(kinds, counts, strict=True), 1)
    ]
    if least is not None:  # Kueue takes it for one pod set
        last = max(number for number, count in enumerate(counts) if count)
        sets[last]["minCount"] = max(1, least - sum(counts[:last]))
    for one, kind in zip(sets, kinds, strict=True):
        if kind.topology is not None:
            one["topologyRequest"] = kind.topology
    if standby:
        anywhere = {} if kinds[0].topology is None else {"topologyRequest": ANYWHERE}
        sets.append({"name": STANDBY, "count": standby, "template": kinds[0].template, **anywhere})
    return sets


def shape(job: JobSpec, kinds: Sequence[SeatKind]) -> str:
    """A digest, 10 hex digits, of what is asked for beside the number of seats."""
    asked: list[Any] = [pod_sets(kinds, 1, standby=job.standby.workers), priority_class(job)]
    if len(kinds) > 1:
        asked.append([kind.room for kind in kinds])
    return sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:10]


def pool_names(kinds: Sequence[SeatKind]) -> str:
    """The names of the pools of each kind, as they are kept in an annotation."""
    return ";".join(",".join(pool.name for pool in kind.pools) for kind in kinds)


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


def _topology(job: JobSpec) -> Json | None:
    """The request to Kueue's topology-aware scheduling, if the job leaves it to that where its workers are."""
    if job.queue is None or not job.queue.topology:
        return None
    policy, level = pod_spread(job), job.spread.topology_key
    if policy is SpreadPolicy.SINGLE_ZONE:
        return {"required": level}
    if policy is SpreadPolicy.ZONE_PER_PIPELINE:
        return {"podSetSliceRequiredTopology": level, "podSetSliceSize": job.topology.stages}
    return ANYWHERE


def _asked(spec: Json) -> Json:
    """What a pod asks for, wherever it is."""
    kept: Json = {key: spec[key] for key in _ASKED if spec.get(key)}
    for group in ("initContainers", "containers"):
        if spec.get(group):
            kept[group] = [_container(one) for one in spec[group]]
    return kept


def _template(job: JobSpec, pools: Sequence[NodePool], meta: JobMeta, settings: WorkerPodSettings) -> Json:
    """The pod as far as Kueue goes by it. Of several pools it may choose: it knows of no nodes but those of flavors,
    and their taints are tolerated.
    """
    first = worker_pod(job, meta, 0, pools[0] if pools else None, settings)["spec"]
    spec = first if len(pools) == 1 else worker_pod(job, meta, 0, None, settings)["spec"]
    kept: Json = _asked(first) | {key: spec[key] for key in _WHERE if spec.get(key)}
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
    return {"metadata": {}, "spec": {**kept, "restartPolicy": "Never"}}


def _container(one: Mapping[str, Any]) -> Json:
    return {key: one[key] for key in ("name", "resources", "restartPolicy") if one.get(key)}
