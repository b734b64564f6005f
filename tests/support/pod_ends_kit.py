"""Pods that end in various ways, and checks of the signals that the operator reads from them."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from bamboo_core.names import TRAINER_CONTAINER
from bamboo_operator.signals.signals import Signal, SignalKind, pod_signal
from cluster.client import Json
from cluster.handle import Cluster

IMAGE, GRACE = "busybox:1.36", 30
SLOW_FAREWELL = "trap 'sleep 3; exit 0' TERM; echo up; while :; do sleep 0.1; done"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEnd:
    """A pod that ends without being deleted. source, message, code: expected signal. container, spec: more fields."""

    name: str
    script: str
    source: str
    message: str
    code: int
    container: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def manifest(self) -> Json:
        main = {"name": TRAINER_CONTAINER, "terminationMessagePolicy": "FallbackToLogsOnError", **self.container}
        return _pod(self.name, self.script, main, self.spec)


EVERYWHERE = (
    PodEnd(name="done", script="echo bye", source="ContainerCompleted", message="exited with code 0", code=0),
    PodEnd(
        name="crash",
        script="echo first; echo out of luck; exit 7",
        source="ContainerFailed",
        message="exited with code 7: out of luck",
        code=7,
    ),
    PodEnd(
        name="killed",
        script="sh -c 'kill -9 $$$$'; exit $?",  # of a child, for no first process of a container can kill itself
        source="ContainerFailed",
        message="was ended by SIGKILL (exit code 137): Killed",
        code=137,
    ),
    PodEnd(
        name="unprepared",
        script="echo never",
        source="ContainerFailed",
        message="could not start: init container prepare exited with code 4: no disk",
        code=4,
        spec={
            "initContainers": [
                {
                    "name": "prepare",
                    "image": IMAGE,
                    "command": ["sh", "-c", "echo no disk; exit 4"],
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                }
            ]
        },
    ),
)
# Ends that need limits and probes, which a kubelet that runs processes does not support
ON_REAL_NODES = (
    PodEnd(
        name="greedy",
        script="dd if=/dev/zero of=/dev/null bs=200M count=1",
        source="OOMKilled",
        message="ran out of memory and was killed (OOMKilled, exit code 137)",
        code=137,
        container={"resources": {"limits": {"memory": "40Mi"}}},
    ),
    PodEnd(
        name="unwell",
        script="while :; do sleep 0.1; done",
        source="ContainerFailed",
        message="was ended by SIGKILL (exit code 137)",
        code=137,
        container={"livenessProbe": {"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1}},
        spec={"terminationGracePeriodSeconds": 1},
    ),
)


def check_ends(cluster: Cluster, namespace: str, ends: tuple[PodEnd, ...]) -> None:
    """Create the pods, wait until all have ended, and compare the operator's signals with the expected ones."""
    for end in ends:
        cluster.api.create(end.manifest, namespace)
    for end in ends:
        found = cluster.api.wait(
            path(namespace, end.name), lambda pod: pod.get("status", {}).get("phase") in ("Succeeded", "Failed"), 180
        )
        read = pod_signal(found, datetime.now(UTC))
        expected = Signal(kind=SignalKind.LOST, source=end.source, message=end.message, exit_code=end.code)
        assert read == expected, (end.name, found["status"])


def check_farewell(cluster: Cluster, namespace: str) -> None:
    """Check that a deleted pod gives a notice with the rest of its grace period, and that the pod then disappears."""
    main = {"name": TRAINER_CONTAINER}
    cluster.api.create(_pod("polite", SLOW_FAREWELL, main, {"terminationGracePeriodSeconds": GRACE}), namespace)
    where = path(namespace, "polite")
    running = cluster.api.wait(where, lambda pod: pod.get("status", {}).get("phase") == "Running", 180)
    assert pod_signal(running, datetime.now(UTC)) is None
    leaving = cluster.api.request("DELETE", where, {})  # the answer: a moment later it may be gone
    notice = pod_signal(leaving, datetime.now(UTC))
    assert notice is not None
    assert (notice.kind, notice.source) == (SignalKind.NOTICE, "PodDeleted")
    assert GRACE / 2 < notice.seconds <= GRACE
    cluster.api.wait(where, lambda pod: not pod, GRACE + 60)


def path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def _pod(name: str, script: str, main: Json, spec: Json) -> Json:
    container = {"image": IMAGE, "command": ["sh", "-c", script], **main}
    usual = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 2, "containers": [container], **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": usual}
