"""The pod templates of a job, their merging, and the nodes that a pool's preset selects.

The CRD takes any field in a template, because Kubernetes versions differ. The operator has the API server check pods.

A user's template is merged over the operator's. Maps are merged key by key, and null removes a key. Lists whose items
have a key are merged by it: containers are merged, other items replaced. Any other list is replaced.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bamboo_core.job.placement_spec import GPU_SUFFIX, Capacity, NodePool, Preset
from bamboo_core.job.spec import JobSpec
from bamboo_core.names import TRAINER_CONTAINER

PATH = "spec.worker.template"


def templates_of(job: JobSpec) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the job's pod templates as (path in the manifest, template): the workers', and each pool's if not empty."""
    yield PATH, job.worker.template
    for index, pool in enumerate(job.node_pools):
        if pool.template:
            yield pool_path(index), pool.template


def pool_path(index: int) -> str:
    return f"spec.nodePools[{index}].template"


# The key of a list's items, by the list's name. Items of the first two are merged.
_DEEP = {"containers": "name", "initContainers": "name"}
KEYED = {
    **_DEEP,
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "evictionResponders": "name",
    "hostAliases": "ip",
}


def merge(base: Any, override: Any, name: str = "") -> Any:
    """Return `override` merged over `base`, as the module describes; neither is changed. name: the name of the field
    that holds both.
    """
    if isinstance(base, Mapping) and isinstance(override, Mapping):
        merged = {key: merge(base.get(key), value, key) for key, value in override.items() if value is not None}
        return {key: value for key, value in {**base, **merged}.items() if key in merged or key not in override}
    if isinstance(override, Mapping):
        return {key: merge(None, value, key) for key, value in override.items() if value is not None}
    if isinstance(override, Sequence) and not isinstance(override, str):
        return _merge_lists(base if isinstance(base, list) else [], override, name)
    return override


def _merge_lists(base: Sequence[Any], override: Sequence[Any], name: str) -> list[Any]:
    key = KEYED.get(name)
    if key is None:
        return [merge(None, item) for item in override]
    merged = {item[key]: item for item in base}
    for item in override:
        old = merged.get(item[key]) if name in _DEEP else None
        merged[item[key]] = merge(old, item)
    return list(merged.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlacement:
    """A pod's constraints on its node, and the pod's annotations."""

    selector: Mapping[str, str] = field(default_factory=dict)  # node labels
    expressions: tuple[Mapping[str, Any], ...] = ()  # of a node affinity
    tolerations: tuple[Mapping[str, Any], ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)


def _one_of(key: str, *values: str) -> Mapping[str, Any]:
    return {"key": key, "operator": "In", "values": list(values)}


def _none_of(key: str, *values: str) -> Mapping[str, Any]:
    """Return a term that excludes these values of a label, and matches nodes without the label."""
    return {"key": key, "operator": "NotIn", "values": list(values)}


def _bears(key: str, value: str) -> Mapping[str, Any]:
    return {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"}


_EKS, _KARPENTER = "eks.amazonaws.com/capacityType", "karpenter.sh/capacity-type"
_GKE, _AKS = "cloud.google.com/gke-spot", "kubernetes.azure.com/scalesetpriority"
_STAY = {"karpenter.sh/do-not-disrupt": "true"}  # spot interruptions are not asked for permission

PLACEMENTS: dict[tuple[Preset, Capacity], NodePlacement] = {
    (Preset.EKS, Capacity.SPOT): NodePlacement(selector={_EKS: "SPOT"}),
    (Preset.EKS, Capacity.ON_DEMAND): NodePlacement(selector={_EKS: "ON_DEMAND"}),
    (Preset.KARPENTER, Capacity.SPOT): NodePlacement(selector={_KARPENTER: "spot"}, annotations=_STAY),
    (Preset.KARPENTER, Capacity.ON_DEMAND): NodePlacement(
        expressions=(_one_of(_KARPENTER, "on-demand", "reserved"),), annotations=_STAY
    ),
    (Preset.GKE, Capacity.SPOT): NodePlacement(selector={_GKE: "true"}, tolerations=(_bears(_GKE, "true"),)),
    (Preset.GKE, Capacity.ON_DEMAND): NodePlacement(
        expressions=(_none_of(_GKE, "true"), _none_of("cloud.google.com/gke-preemptible", "true"))
    ),
    (Preset.AKS, Capacity.SPOT): NodePlacement(selector={_AKS: "spot"}, tolerations=(_bears(_AKS, "spot"),)),
    (Preset.AKS, Capacity.ON_DEMAND): NodePlacement(expressions=(_none_of(_AKS, "spot"),)),
}


def placement(job: JobSpec, pool: NodePool | None) -> NodePlacement:
    """Return the node constraints of a worker in that pool. pool: None for a job without pools. Nodes with a special
    device often have a taint for it; a worker that requests the device tolerates the taint.
    """
    chosen = PLACEMENTS.get((pool.preset, pool.capacity), NodePlacement()) if pool else NodePlacement()
    devices = sorted(name for name in worker_resources(job, pool) if "/" in name)
    return NodePlacement(
        selector=chosen.selector,
        expressions=chosen.expressions,
        tolerations=(*chosen.tolerations, *({"key": name, "operator": "Exists"} for name in devices)),
        annotations={"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", **chosen.annotations},
    )


def worker_resources(job: JobSpec, pool: NodePool | None) -> dict[str, Any]:
    """Return the quantities of worker.resources by name: requests, else limits; the pool's template overrides each."""
    spec = _spec_of(pool.template if pool is not None else {})
    containers = (one for one in spec.get("containers") or () if isinstance(one, Mapping))
    trainer = next((one for one in containers if one.get("name") == TRAINER_CONTAINER), {})
    own_resources = trainer.get("resources")
    of_pool: Mapping[str, Any] = own_resources if isinstance(own_resources, Mapping) else {}
    found: dict[str, Any] = {}
    for kind, of_all in (("limits", job.worker.resources.limits), ("requests", job.worker.resources.requests)):
        own = of_pool.get(kind)
        merged = {**of_all, **(own if isinstance(own, Mapping) else {})}
        found |= {name: quantity for name, quantity in merged.items() if quantity is not None}
    return found


def asks_for_gpus(job: JobSpec, pool: NodePool | None) -> bool:
    """Return whether the pods of a pool request GPUs. pool: None for a job without pools."""
    asked = worker_resources(job, pool).items()
    return any(name.endswith(GPU_SUFFIX) and str(quantity) != "0" for name, quantity in asked)


def asking_for_gpus(job: JobSpec) -> str:
    """Return the subject and verb of a sentence on why workers need GPUs, such as "spec.worker.resources asks". If some
    workers request no GPUs, the subject is spec.worker.devices if that is above 1; else return "".
    """
    if all(asks_for_gpus(job, pool) for pool in job.node_pools or (None,)):
        return "spec.worker.resources asks" if job.worker.resources.asks_for_gpus else "each node pool's template asks"
    return f"spec.worker.devices {job.worker.devices} asks" if job.worker.devices > 1 else ""


def asked_of_nodes(job: JobSpec, pool: NodePool | None) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    """Return the node selector and the tolerations of a pool's pods, from templates and the pool's preset. Affinities,
    of templates or of the preset, are left out.
    """
    where, of_all = placement(job, pool), _spec_of(job.worker.template)
    of_pool = _spec_of(pool.template if pool is not None else {})
    selector = {**(of_all.get("nodeSelector") or {}), **(of_pool.get("nodeSelector") or {})}
    selector = {key: value for key, value in selector.items() if value is not None}
    tolerations = of_pool.get("tolerations", of_all.get("tolerations")) or ()
    return {**selector, **where.selector}, [*tolerations, *where.tolerations]


def _spec_of(template: Mapping[str, Any]) -> Mapping[str, Any]:
    spec = template.get("spec")
    return spec if isinstance(spec, Mapping) else {}
