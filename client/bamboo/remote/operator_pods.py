"""Pods of operators: the pod of the operator that manages a namespace, and its command-line arguments."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from bamboo_core.kube.api import KubeApi, Object, pods_path
from bamboo_core.kube.errors import ApiError, RemoteError
from bamboo_core.names import LABEL_ACTIVE

OPERATOR: Final = "app.kubernetes.io/name=bamboo-operator"
INSTANCE: Final = "app.kubernetes.io/instance"


async def operator_pods(api: KubeApi, namespace: str | None) -> list[Object]:
    """List the operators' pods in a namespace; None: in the whole cluster. Raises RemoteError."""
    place = pods_path(namespace) if namespace else "/api/v1/pods"
    try:
        return await api.listed(place, {"labelSelector": OPERATOR})
    except ApiError as error:
        if error.status != 403 or namespace:
            raise
        raise RemoteError(f"{error}; --operator-namespace says where the operator is") from None


def operator_for(pods: Sequence[Mapping[str, Any]], namespace: str) -> Mapping[str, Any] | None:
    """Return the running pod of the operator that watches the namespace by name, else of one that watches all.

    None if no pod runs or matches, or pods of several releases match. A single running pod always matches, since it may
    be configured without arguments. Of several replicas of a release, return the active one, else the first.
    """
    pods = [pod for pod in pods if is_running(pod)]
    if len(pods) == 1:
        return pods[0]
    watched = [(pod, arguments(pod, "--namespace")) for pod in pods]
    by_name = [pod for pod, names in watched if namespace in names]
    candidates = by_name or [pod for pod, names in watched if not names]
    releases = {(pod["metadata"]["namespace"], _label(pod, INSTANCE) or pod["metadata"]["name"]) for pod in candidates}
    if len(releases) != 1:
        return None
    return next((pod for pod in candidates if _label(pod, LABEL_ACTIVE)), candidates[0])


def _label(pod: Mapping[str, Any], name: str) -> str | None:
    value: str | None = (pod["metadata"].get("labels") or {}).get(name)
    return value


def arguments(pod: Mapping[str, Any], option: str) -> set[str]:
    """Return all values of an option, such as --namespace, in the commands and arguments of a pod's containers."""
    values = set()
    for container in pod["spec"].get("containers") or ():
        words = [*(container.get("command") or ()), *(container.get("args") or ())]
        values |= {word.partition("=")[2] for word in words if word.startswith(f"{option}=")}
        values |= {value for word, value in pairwise(words) if word == option}
    return values


def is_running(pod: Mapping[str, Any]) -> bool:
    return pod.get("status", {}).get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")


def is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
