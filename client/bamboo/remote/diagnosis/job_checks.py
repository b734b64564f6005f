"""Checks for a job: room in quotas, its queue, and whether a node fits a worker. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from bamboo.remote.diagnosis.facts import ClusterFacts, Object, Unreadable
from bamboo.remote.diagnosis.findings import Finding, ok, problem, unknown, warning
from bamboo.remote.diagnosis.quantities import quantity
from bamboo_core.job.node_placement import asked_of_nodes, worker_resources
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.job.spec import JobSpec
from bamboo_core.text import count

KEEPS_OFF = ("NoSchedule", "NoExecute")


def job(facts: ClusterFacts) -> Iterator[Finding]:
    """Yield the findings for a job; without one, of quotas and nodes only."""
    yield from _quotas(facts)
    if facts.spec is not None and facts.spec.queue is not None:
        yield _queue(f"queue {facts.spec.queue.name}", facts)
    yield from _nodes(facts)


def _quotas(facts: ClusterFacts) -> Iterator[Finding]:
    if isinstance(facts.quotas, Unreadable):
        yield unknown("quotas", facts.quotas.why)
        return
    for one in facts.quotas:
        status = one.get("status") or {}
        used = status.get("used") or {}
        full = [
            name
            for name, most in sorted((status.get("hard") or {}).items())
            if quantity(used.get(name, "0")) >= quantity(most)
        ]
        name = f"quota {one['metadata']['name']}"
        if full:
            yield problem(name, f"it is used up: {', '.join(full)}", "raise it, or end other pods of the namespace")
        else:
            yield ok(name, "it has room")


def _queue(subject: str, facts: ClusterFacts) -> Finding:
    queue = facts.queue
    if isinstance(queue, Unreadable):
        return unknown(subject, queue.why)
    if queue is None:
        return problem(
            subject,
            f"{facts.namespace} has no such LocalQueue of kueue.x-k8s.io/v1beta2",
            "create it, or install Kueue 0.18 or newer (docs/install.md)",
        )
    active = [one for one in (queue.get("status") or {}).get("conditions") or () if one.get("type") == "Active"]
    stopped = [one.get("message", "") for one in active if one.get("status") != "True"]
    if stopped:
        return problem(subject, f"it is not active: {stopped[0]}", "look at its ClusterQueue")
    return ok(subject, "the job's workers wait there for quota")


def _nodes(facts: ClusterFacts) -> Iterator[Finding]:
    if isinstance(facts.nodes, Unreadable):
        yield unknown("nodes", facts.nodes.why)
        return
    usable = [node for node in facts.nodes if _usable(node)]
    if not usable:
        yield problem("nodes", f"none of {count(len(facts.nodes), 'node')} is ready", "look at: kubectl get nodes")
        return
    yield ok("nodes", f"{count(len(usable), 'node')} ready")
    if facts.spec is None:
        return
    pools: tuple[NodePool | None, ...] = facts.spec.node_pools or (None,)
    for pool in pools:
        subject = "workers" if pool is None else f"pool {pool.name}"
        fitting = sum(_fits(node, facts.spec, pool) for node in usable)
        if fitting:
            yield ok(subject, f"a worker fits on {count(fitting, 'node')}")
        else:
            yield warning(
                subject,
                "no node that is ready now fits a worker",
                "right if an autoscaler adds nodes; else compare the nodes' labels, taints and allocatable resources"
                " with what a worker asks for",
            )


def _usable(node: Object) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return ready and not (node.get("spec") or {}).get("unschedulable")


def _fits(node: Object, spec: JobSpec, pool: NodePool | None) -> bool:
    """Return whether the empty node would take a worker, by node selector, taints and allocatable resources.

    Affinities and running pods do not count.
    """
    labels = node["metadata"].get("labels") or {}
    taints = [one for one in (node.get("spec") or {}).get("taints") or () if one["effect"] in KEEPS_OFF]
    free = (node.get("status") or {}).get("allocatable") or {}
    selector, tolerations = asked_of_nodes(spec, pool)
    return (
        all(labels.get(key) == value for key, value in selector.items())
        and all(any(_tolerates(one, taint) for one in tolerations) for taint in taints)
        and all(
            quantity(free.get(name, "0")) >= quantity(amount) for name, amount in worker_resources(spec, pool).items()
        )
    )


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    """Return whether a toleration matches a taint, by Kubernetes' rules for an empty key or effect."""
    exists = toleration.get("operator") == "Exists"
    key = toleration.get("key") or ""
    return (
        (key == taint["key"] or (exists and not key))
        and (exists or (toleration.get("value") or "") == (taint.get("value") or ""))
        and toleration.get("effect") in (None, "", taint["effect"])
    )
