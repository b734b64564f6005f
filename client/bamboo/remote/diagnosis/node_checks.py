"""What follows from the facts about nodes: whether a job's pools have any, their devices, who gives notice. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bamboo.remote.diagnosis.facts import ClusterFacts, Object, Unreadable
from bamboo.remote.diagnosis.findings import Finding, ok, problem, unknown, warning
from bamboo.remote.diagnosis.quantities import quantity
from bamboo_core.job.node_placement import PLACEMENTS, asked_of_nodes, placement, worker_resources
from bamboo_core.job.placement_spec import GPU_SUFFIX, Capacity, NodePool
from bamboo_core.job.spec import JobSpec, whole_workers
from bamboo_core.names import LABEL_NOTICE_SECONDS, NOTICE_SECONDS
from bamboo_core.text import count

ZONE = "topology.kubernetes.io/zone"
GPU_LABELS = (  # which say that a node has a GPU, whether or not a device plugin has found it
    "nvidia.com/gpu.present",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-count",
    "kubernetes.azure.com/accelerator",
)
MANAGED = ("eks.amazonaws.com/nodegroup", "karpenter.sh/nodepool")
KEEPS_OFF = ("NoSchedule", "NoExecute")
PLUGIN = "install NVIDIA's device plugin or GPU operator (docs/install.md)"


def nodes(facts: ClusterFacts) -> Iterator[Finding]:
    if isinstance(facts.nodes, Unreadable):
        yield unknown("nodes", facts.nodes.why)
        return
    usable = [node for node in facts.nodes if _usable(node)]
    if not usable:
        yield problem("nodes", f"none of {count(len(facts.nodes), 'node')} is ready", "look at: kubectl get nodes")
        return
    yield _overview(usable)
    yield from _device_plugin(usable)
    yield from _notices(usable)
    yield from _notice_seconds(usable)
    if facts.spec is not None:
        yield from _pools(usable, facts.spec)


def _overview(usable: Sequence[Object]) -> Finding:
    spot = sum(_is_spot(node) for node in usable)
    zones = {_labels(node).get(ZONE) for node in usable} - {None}
    return ok("nodes", f"{count(len(usable), 'node')} ready, {spot} of them spot, in {count(len(zones), 'zone')}")


def _device_plugin(usable: Sequence[Object]) -> Iterator[Finding]:
    bare = [
        node["metadata"]["name"]
        for node in usable
        if any(_labels(node).get(label, "false") not in ("false", "0", "none") for label in GPU_LABELS)
        and not any(quantity(amount) for name, amount in _allocatable(node).items() if name.endswith(GPU_SUFFIX))
    ]
    if bare:
        yield problem(
            "GPU plugin", f"{count(len(bare), 'node')} with GPUs, such as {bare[0]}, offer none of them to pods", PLUGIN
        )


def _notices(usable: Sequence[Object]) -> Iterator[Finding]:
    """Self-managed nodes of EC2 are taken without a word unless something on the cluster listens."""
    alone = [
        node
        for node in usable
        if str((node.get("spec") or {}).get("providerID") or "").startswith("aws:")
        and not any(label in _labels(node) for label in MANAGED)
    ]
    if alone:
        yield warning(
            "notices",
            f"{count(len(alone), 'node')} of AWS, such as {alone[0]['metadata']['name']}, belong to no managed node"
            " group and no Karpenter pool: nothing may tell Bamboo that they will be taken",
            "install AWS node termination handler (docs/install.md), unless it is there",
        )


def _notice_seconds(usable: Sequence[Object]) -> Iterator[Finding]:
    for node in usable:
        said = _labels(node).get(LABEL_NOTICE_SECONDS)
        if said is not None and not NOTICE_SECONDS.fullmatch(said):
            yield warning(
                "notices",
                f"{node['metadata']['name']} has the label {LABEL_NOTICE_SECONDS}={said}, which says nothing",
                "expected whole seconds, such as 120",
            )


def _pools(usable: Sequence[Object], spec: JobSpec) -> Iterator[Finding]:
    wanted = whole_workers(spec)
    pools: tuple[NodePool | None, ...] = spec.node_pools or (None,)
    for pool in pools:
        subject = "nodes" if pool is None else f"pool {pool.name}"
        fitting = [node for node in usable if _admits(node, spec, pool)]
        room = sum(_room(node, spec, pool) for node in fitting)
        if not fitting:
            yield warning(
                subject,
                "no node that is ready now fits",
                "right if an autoscaler adds nodes; else compare the nodes' labels and taints with the pool's preset",
            )
        elif not room:
            yield problem(
                subject,
                f"none of {count(len(fitting), 'fitting node')} is large enough for a worker's requests",
                "lower spec.worker.resources, or use larger nodes",
            )
        elif room < wanted:
            yield warning(
                subject,
                f"{count(len(fitting), 'fitting node')} with room for {room} of {wanted} workers",
                "right if an autoscaler adds nodes or other pools help; else the job trains on fewer, if elastic",
            )
        else:
            yield ok(subject, f"{count(len(fitting), 'fitting node')}, for {wanted} workers")


def _admits(node: Object, spec: JobSpec, pool: NodePool | None) -> bool:
    """Whether labels and taints of a node let such a worker on it. Affinities of templates are not looked at."""
    labels = _labels(node)
    selector, tolerations = asked_of_nodes(spec, pool)
    return (
        all(labels.get(key) == value for key, value in selector.items())
        and all(_meets(labels, expression) for expression in placement(spec, pool).expressions)
        and all(any(_tolerates(one, taint) for one in tolerations) for taint in _keeping_taints(node))
    )


def _meets(labels: Mapping[str, str], expression: Mapping[str, Any]) -> bool:
    inside = labels.get(expression["key"]) in expression["values"]
    return inside if expression["operator"] == "In" else not inside


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    """As Kubernetes does: an empty key with Exists tolerates everything, an empty effect every effect."""
    exists = toleration.get("operator") == "Exists"
    key = toleration.get("key") or ""
    return (
        (key == taint["key"] or (exists and not key))
        and (exists or (toleration.get("value") or "") == (taint.get("value") or ""))
        and toleration.get("effect") in (None, "", taint["effect"])
    )


def _room(node: Object, spec: JobSpec, pool: NodePool | None) -> int:
    """Workers of that pool that an empty node like this has room for, no more than a node is to have."""
    asked = worker_resources(spec, pool)
    there = _allocatable(node)
    fits = [quantity(there.get(name, "0")) // quantity(amount) for name, amount in asked.items() if quantity(amount)]
    return min([spec.spread.workers_per_node, *(int(one) for one in fits)])


def _usable(node: Object) -> bool:
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in _part(node, "status", "conditions"))
    return ready and not (node.get("spec") or {}).get("unschedulable")


def _is_spot(node: Object) -> bool:
    labels = _labels(node)
    selectors = [where.selector for (_, capacity), where in PLACEMENTS.items() if capacity is Capacity.SPOT]
    return any(all(labels.get(key) == value for key, value in one.items()) for one in selectors)


def _keeping_taints(node: Object) -> list[Mapping[str, Any]]:
    return [taint for taint in _part(node, "spec", "taints") if taint["effect"] in KEEPS_OFF]


def _part(node: Object, outer: str, inner: str) -> Sequence[Mapping[str, Any]]:
    return (node.get(outer) or {}).get(inner) or ()


def _labels(node: Object) -> Mapping[str, str]:
    return node["metadata"].get("labels") or {}


def _allocatable(node: Object) -> Mapping[str, str]:
    return (node.get("status") or {}).get("allocatable") or {}
