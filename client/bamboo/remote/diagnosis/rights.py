"""The rights that the operator and a person need, as a review of the API server can be asked for them."""

from collections.abc import Iterable, Iterator
from typing import Final

from bamboo.remote.diagnosis.facts import Right
from bamboo_core.names import GROUP, PLURAL


def _rights(group: str, resource: str, verbs: str, *, namespaced: bool = True) -> Iterator[Right]:
    return (Right(verb, group, resource, namespaced) for verb in verbs.split())


def _all(*several: Iterable[Right]) -> tuple[Right, ...]:
    return tuple(right for one in several for right in one)


OPERATOR: Final = _all(  # as operator/rbac.yaml grants them, but for those in the operator's own namespace
    _rights(GROUP, PLURAL, "list watch delete"),
    _rights(GROUP, f"{PLURAL}/status", "patch"),
    _rights(GROUP, f"{PLURAL}/finalizers", "update"),
    _rights("", "pods", "get list watch create delete"),
    _rights("", "nodes", "list watch", namespaced=False),
    _rights("apps", "controllerrevisions", "list create delete"),
    _rights("", "events", "create patch list"),
    _rights("authentication.k8s.io", "tokenreviews", "create", namespaced=False),
    _rights("authorization.k8s.io", "subjectaccessreviews", "create", namespaced=False),
    _rights("networking.k8s.io", "networkpolicies", "create patch"),
    _rights("policy", "poddisruptionbudgets", "create patch delete"),
    _rights("apiextensions.k8s.io", "customresourcedefinitions", "list watch", namespaced=False),
    _rights("", "namespaces", "list watch", namespaced=False),
)
PERSON: Final = {  # what each command needs
    "list, status and top": _all(_rights(GROUP, PLURAL, "get list"), _rights("", "pods", "list")),
    "events and logs": _all(_rights("", "events", "list"), _rights("", "pods/log", "get")),
    "submit, suspend and resume": _all(_rights(GROUP, PLURAL, "create patch")),
    "delete": _all(_rights(GROUP, PLURAL, "delete")),
    "preempt": _all(_rights("", "pods", "delete")),
}
