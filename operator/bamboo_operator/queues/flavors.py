"""The nodes on which a queue has admitted a job's workers: what the flavors of their seats say of nodes. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bamboo_core.job.node_placement import NodePlacement, placement
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.job.spec import JobSpec
from bamboo_core.names import LABEL_POD_SET
from bamboo_operator.manifests.placement import place
from bamboo_operator.manifests.template import asked_spec
from bamboo_operator.manifests.workload import POD_SET, STANDBY, UNCONSTRAINED, WORKERS, WORKLOAD
from bamboo_operator.queues.topology import Domain

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlavorNodes:
    """Nodes as ResourceFlavors describe them. labels: that they have; tolerations: that pods there need."""

    labels: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()


def nodes_of(flavors: Iterable[Mapping[str, Any]]) -> FlavorNodes:
    """The nodes that all these ResourceFlavors describe."""
    labels: dict[str, str] = {}
    tolerations: list[Mapping[str, Any]] = []
    for flavor in flavors:
        spec = flavor.get("spec") or {}
        labels |= spec.get("nodeLabels") or {}
        tolerations += [one for one in spec.get("tolerations") or () if one not in tolerations]
    return FlavorNodes(labels=labels, tolerations=tuple(tolerations))


def next_pod_set(sets: Mapping[str, int], spare: bool, staying: Iterable[Mapping[str, Any]]) -> str:
    """The pod set in whose seat the next pod is: a worker's, or once all of these are taken a spare one's, if there are
    any. sets: the seats for workers that run stages, by pod set. staying: the job's pods but those that leave.
    """
    taken = Counter(((pod.get("metadata") or {}).get("labels") or {}).get(LABEL_POD_SET) for pod in staying)
    free = (name for name, seats in sets.items() if taken[name] < seats)
    return next(free, STANDBY if spare else next(iter(sets), WORKERS))


def pools_on(job: JobSpec, pools: Sequence[NodePool], nodes: FlavorNodes) -> Sequence[NodePool]:
    """Those of these pools that mean such nodes, all of them if none does; where the queue says which nodes, or which
    of the job's pools, no pool waits for another one.
    """
    fitting = pools
    if nodes.labels:
        fitting = [pool for pool in pools if _may_be(job, pool, nodes.labels)] or pools
    elif len(pools) == len(job.node_pools):
        return pools
    return [replace(pool, after_seconds=0, revert=False) for pool in fitting]


def placed(pod: Json, pod_set: str, nodes: FlavorNodes) -> Json:
    """The pod in a seat of that pod set, on such nodes."""
    metadata, spec = pod["metadata"], dict(pod["spec"])
    place(spec, NodePlacement(selector=nodes.labels, tolerations=nodes.tolerations))
    labels = {**(metadata.get("labels") or {}), LABEL_POD_SET: pod_set}
    return {**pod, "metadata": {**metadata, "labels": labels}, "spec": spec}


def in_domain(pod: Json, domain: Domain, workload: str) -> Json:
    """The pod in that domain of a topology, and so marked that Kueue counts it as one of that Workload's there."""
    metadata, spec = pod["metadata"], dict(pod["spec"])
    place(spec, NodePlacement(selector=domain.labels))
    labels = {**metadata["labels"], POD_SET: metadata["labels"][LABEL_POD_SET]}
    annotations = {**(metadata.get("annotations") or {}), WORKLOAD: workload, UNCONSTRAINED: "true"}
    return {**pod, "metadata": {**metadata, "labels": labels, "annotations": annotations}, "spec": spec}


def _may_be(job: JobSpec, pool: NodePool, labels: Mapping[str, str]) -> bool:
    """Can a node with these labels be one of that pool's? What a flavor does not say of a node is open."""
    where = placement(job, pool)
    selector = {**(asked_spec(job, pool).get("nodeSelector") or {}), **where.selector}
    if any(labels.get(key, value) != value for key, value in selector.items()):
        return False
    named = [one for one in where.expressions if one["key"] in labels]
    return all((labels[one["key"]] in one["values"]) == (one["operator"] == "In") for one in named)
