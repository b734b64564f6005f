"""Checks for causes that keep jobs from starting: CRD, operator, permissions, quotas, Kueue queue, nodes. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import version as distribution_version
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from bamboo.remote.operator_pods import arguments, is_ready, is_running, operator_for
from bamboo_core.job.model import Object as InnerObject
from bamboo_core.job.model import ObjectList, api_fields
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.job.pod_templates import asked_of_nodes, worker_resources
from bamboo_core.job.spec import JobSpec
from bamboo_core.names import GROUP, PLURAL, VERSION
from bamboo_core.text import count


class Severity(StrEnum):
    """The severity of a finding: a PROBLEM keeps jobs from training, a WARNING may; UNKNOWN if nothing was read."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a check. subject: the checked object, such as "operator". advice: a remedy; "" if none is known."""

    severity: Severity
    subject: str
    message: str
    advice: str = ""


def ok(subject: str, message: str) -> Finding:
    return Finding(severity=Severity.OK, subject=subject, message=message)


def unknown(subject: str, message: str, advice: str = "") -> Finding:
    return Finding(severity=Severity.UNKNOWN, subject=subject, message=message, advice=advice)


def warning(subject: str, message: str, advice: str) -> Finding:
    return Finding(severity=Severity.WARNING, subject=subject, message=message, advice=advice)


def problem(subject: str, message: str, advice: str) -> Finding:
    return Finding(severity=Severity.PROBLEM, subject=subject, message=message, advice=advice)


Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A fact that could not be read. why: the reason, in words for the user."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """The cluster's objects and the user's permissions, which the checks examine. None: the object does not exist.

    namespace: the jobs' namespace. operators: the operators' pods. lease: the Lease of the namespace's operator; None
    also if the operator is not known or names no Lease. rights: for each verb that `submit` needs, whether the user may
    use it on jobs. spec: the spec of the job to check; None to check no job. queue: the job's Kueue LocalQueue.
    """

    namespace: str
    crd: Object | Unreadable | None
    operators: Sequence[Object] | Unreadable
    lease: Object | Unreadable | None
    rights: Mapping[str, bool] | Unreadable
    quotas: Sequence[Object] | Unreadable
    nodes: Sequence[Object] | Unreadable
    spec: JobSpec | None = None
    queue: Object | Unreadable | None = None

    @property
    def operator_pod(self) -> Object | None:
        """The running pod of the namespace's operator; None if none is known to run, or it is unclear which it is."""
        return None if isinstance(self.operators, Unreadable) else operator_for(self.operators, self.namespace)


LEASE_SECONDS = 60.0  # twice the duration of the operator's Lease
MOST_NAMED = 6
INSTALL = "install Bamboo with its chart (docs/install.md)"


def installation(facts: ClusterFacts, now: datetime) -> Iterator[Finding]:
    yield from _crd(facts.crd)
    yield from _operator(facts, now)
    yield _rights(facts)


def _crd(crd: Object | Unreadable | None) -> Iterator[Finding]:
    name = f"{PLURAL}.{GROUP}"
    if isinstance(crd, Unreadable):
        yield unknown("CRD", crd.why, "an administrator of the cluster can run `bamboo doctor`")
        return
    if crd is None:
        yield problem("CRD", f"the cluster has no {name}", INSTALL)
        return
    served = {one["name"]: one for one in crd["spec"]["versions"] if one.get("served")}
    if VERSION not in served:
        yield problem("CRD", f"{name} does not serve {VERSION}", "apply crds/bamboojob.yaml of this version")
        return
    known = set(_fields_of_schema(_at(served[VERSION], "schema", "openAPIV3Schema", "properties", "spec")))
    ours = set(fields_of(JobSpec))
    if missing := sorted(ours - known):
        yield problem(
            "CRD",
            f"it is older than this bamboo and would drop {_named(missing)}",
            "apply crds/bamboojob.yaml of this version, or upgrade the chart (docs/upgrade.md)",
        )
    elif more := sorted(known - ours):
        yield warning("CRD", f"it is newer than this bamboo, which does not know {_named(more)}", "upgrade bamboo")
    else:
        yield ok("CRD", f"{name}, with the fields of this bamboo")


def fields_of(kind: type, before: str = "spec") -> Iterator[str]:
    """Yield the paths of a type's fields and nested fields: spec.topology.stages, or in a list spec.nodePools.name."""
    for one in api_fields(kind):
        yield f"{before}.{one.name}"
        if isinstance(one.form, InnerObject | ObjectList):
            yield from fields_of(one.form.kind, f"{before}.{one.name}")


def _fields_of_schema(schema: Mapping[str, Any], before: str = "spec") -> Iterator[str]:
    for name, inner in (schema.get("properties") or {}).items():
        yield f"{before}.{name}"
        yield from _fields_of_schema(inner.get("items") or inner, f"{before}.{name}")


def _operator(facts: ClusterFacts, now: datetime) -> Iterator[Finding]:
    if isinstance(facts.operators, Unreadable):
        yield unknown("operator", facts.operators.why, "--operator-namespace says where it is")
        return
    running = [pod for pod in facts.operators if is_running(pod)]
    if not running:
        waiting = "; ".join(_waiting(pod) for pod in facts.operators)
        yield problem("operator", waiting or "no bamboo-operator was found", "" if waiting else INSTALL)
        return
    pod = facts.operator_pod
    if pod is None:
        yield problem(
            "operator",
            f"{count(len(running), 'operator')} run, and it is not clear which one watches {facts.namespace}",
            "let each namespace be in one operator's watchNamespaces",
        )
        return
    where = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    yield from _watching(facts, pod, where)
    ours, theirs = distribution_version("bamboo-spot"), _label(pod, "app.kubernetes.io/version")
    if theirs and theirs != ours:
        yield warning(
            "operator", f"it is version {theirs}, and this bamboo {ours}", "use one version (docs/upgrade.md)"
        )
    yield from _leased(facts.lease, now)


def _watching(facts: ClusterFacts, pod: Object, where: str) -> Iterator[Finding]:
    watched = arguments(pod, "--namespace")
    if watched and facts.namespace not in watched:
        yield problem(
            "operator",
            f"{where} watches {_named(sorted(watched))}, and not {facts.namespace}",
            f"add {facts.namespace} to the chart's watchNamespaces",
        )
    elif not is_ready(pod):
        yield problem(
            "operator", f"{where} runs and is not ready", f"look at: kubectl logs -n {where.replace('/', ' ')}"
        )
    else:
        yield ok("operator", f"{where} is ready and watches {'all namespaces' if not watched else facts.namespace}")


def _leased(lease: Object | Unreadable | None, now: datetime) -> Iterator[Finding]:
    if isinstance(lease, Unreadable):
        yield unknown("operator", f"its Lease: {lease.why}")
    elif lease is not None:
        renewed = _at(lease, "spec").get("renewTime")
        age = (now - datetime.fromisoformat(renewed).astimezone(UTC)).total_seconds() if renewed else None
        if age is None or age > LEASE_SECONDS:
            since = "ever renewed its Lease" if age is None else f"renewed its Lease for {age:.0f} s"
            yield problem("operator", f"nobody has {since}, so no operator works", "look at the logs of its pods")


def _waiting(pod: Object) -> str:
    states = [one.get("state") or {} for one in _at(pod, "status").get("containerStatuses") or ()]
    reasons = [state["waiting"].get("reason", "") for state in states if "waiting" in state]
    phase = _at(pod, "status").get("phase", "Unknown")
    why = f", {', '.join(filter(None, reasons))}" if any(reasons) else ""
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']} is {phase}{why}"


def _rights(facts: ClusterFacts) -> Finding:
    subject = "your rights"
    if isinstance(facts.rights, Unreadable):
        return unknown(subject, facts.rights.why)
    if missing := [f"{verb} {PLURAL}.{GROUP}" for verb, granted in facts.rights.items() if not granted]:
        return warning(
            subject,
            f"in {facts.namespace} you may not {_named(missing)}, which submit needs",
            "ask an administrator of the cluster for the role edit in that namespace",
        )
    return ok(subject, f"all that submit needs in {facts.namespace}")


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMED])
    return shown if len(names) <= MOST_NAMED else f"{shown} and {len(names) - MOST_NAMED} more"


def _label(pod: Object, key: str) -> str:
    return str((_at(pod, "metadata").get("labels") or {}).get(key) or "")


def _at(body: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    for name in path:
        body = body.get(name) or {}
    return body


KEEPS_OFF = ("NoSchedule", "NoExecute")


def job(facts: ClusterFacts) -> Iterator[Finding]:
    """Check resource quotas, the job's Kueue queue and the nodes; without a job only quotas and nodes."""
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
            if parse_quantity(used.get(name, "0")) >= parse_quantity(most)
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
    """Return whether a worker fits on the node by node selector, taints and allocatable resources.

    Affinity and the pods that already run on the node are ignored.
    """
    labels = node["metadata"].get("labels") or {}
    taints = [one for one in (node.get("spec") or {}).get("taints") or () if one["effect"] in KEEPS_OFF]
    free = (node.get("status") or {}).get("allocatable") or {}
    selector, tolerations = asked_of_nodes(spec, pool)
    return (
        all(labels.get(key) == value for key, value in selector.items())
        and all(any(_tolerates(one, taint) for one in tolerations) for taint in taints)
        and all(
            parse_quantity(free.get(name, "0")) >= parse_quantity(amount)
            for name, amount in worker_resources(spec, pool).items()
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
