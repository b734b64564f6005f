"""What requests to the API server are made of: the paths of objects, kinds of patches, and bodies that several need."""

from typing import Any

from bamboo_core.names import GROUP, PLURAL, VERSION

Object = dict[str, Any]

MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"


def jobs_path(namespace: str | None) -> str:
    """The API's path of the BambooJobs in that namespace; in all of them if it is None."""
    return f"/apis/{GROUP}/{VERSION}" + (f"/namespaces/{namespace}" if namespace else "") + f"/{PLURAL}"


def job_path(namespace: str, name: str) -> str:
    return f"{jobs_path(namespace)}/{name}"


def pods_path(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


def pod_path(namespace: str, name: str) -> str:
    return f"{pods_path(namespace)}/{name}"


def node_path(name: str) -> str:
    return f"/api/v1/nodes/{name}"


def delete_options(uid: str, grace_seconds: int | None = None, propagation: str | None = None) -> Object:
    """For that very object, and not for another one that has its name by now.

    grace_seconds: the pod's own if None. propagation: to what it owns, such as Background; the kind's own if None.
    """
    body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
    if grace_seconds is not None:
        body["gracePeriodSeconds"] = grace_seconds
    if propagation is not None:
        body["propagationPolicy"] = propagation
    return body
