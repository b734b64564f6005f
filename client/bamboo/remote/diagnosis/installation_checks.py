"""Checks of the installation: CRD, operator, and the caller's rights. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version as distribution_version
from typing import Any

from bamboo.remote.diagnosis.facts import ClusterFacts, Object, Unreadable
from bamboo.remote.diagnosis.findings import Finding, ok, problem, unknown, warning
from bamboo.remote.operator_pods import arguments, is_ready, is_running
from bamboo_core.job.model import Object as InnerObject
from bamboo_core.job.model import ObjectList, api_fields
from bamboo_core.job.spec import JobSpec
from bamboo_core.names import GROUP, PLURAL, VERSION
from bamboo_core.text import count

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
    """Yield the paths of a type's fields, such as spec.topology.stages; those of list elements follow the list."""
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
