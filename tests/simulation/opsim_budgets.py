"""The number of evictions that a PodDisruptionBudget allows, as Kubernetes' disruption controller counts it."""

from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]


def is_about(budget: Json, pod: Json) -> bool:
    """Return whether a budget's spec selects the pod. Raises AssertionError for selectors unlike the operator's."""
    labels, selector = pod["metadata"].get("labels") or {}, budget["selector"]
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    chosen = selector.get("matchExpressions") or ()
    assert all(one["operator"] == "In" and one["values"] for one in chosen)
    return all(labels.get(key) == value for key, value in selector["matchLabels"].items()) and all(
        labels.get(one["key"]) in one["values"] for one in chosen
    )


def is_healthy(pod: Json) -> bool:
    """Return whether a pod without a readiness probe is healthy: it runs, and is not being deleted."""
    return pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]


def disruptions_allowed(budget: Json, pods: Iterable[Json]) -> int:
    healthy = sum(1 for pod in pods if is_about(budget, pod) and is_healthy(pod))
    return max(0, healthy - int(budget["minAvailable"]))
