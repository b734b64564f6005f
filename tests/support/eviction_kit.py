"""Evictions as Kubernetes 1.37 makes them of EvictionRequests, in the fields that the operator looks at."""

from typing import Any

from bamboo_core.names import EVICTION_RESPONDER


def eviction(
    *,
    state: str = "Active",
    responder: str = EVICTION_RESPONDER,
    pod: str = "tiny-w3",
    pod_uid: str = "u",
    started: str | None = None,
    **said: str,
) -> dict[str, Any]:
    """state: of the turn of that responder of the pod. said: what the responder has answered."""
    start = {"startTime": started} if started else {}
    return {
        "metadata": {"namespace": "default", "name": f"pod-1-{pod}", "uid": f"e-{pod}"},
        "spec": {"target": {"pod": {"name": pod, "uid": pod_uid}}},
        "status": {
            "requesters": [{"name": "drain.example/nodes", "intent": "Eviction"}],
            "targetResponders": [
                {"name": responder, "priority": 10_000, "state": state},
                {"name": "imperative-eviction.k8s.io/evictor", "priority": 100, "state": "Inactive"},
            ],
            "responders": [{"name": responder, **start, **said}],
        },
    }
