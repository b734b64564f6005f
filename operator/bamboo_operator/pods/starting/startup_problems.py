"""Reasons in a pod's status why it does not start: no node, no image, a missing secret, or a gate that holds it back
(for Kueue's see `queueing`).

Where the status is silent, the operator reads the pod's events (`startup_events`).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any

from bamboo_operator.pods.starting.scheduling_gates import gates_of, waits_for_quota
from bamboo_operator.pods.starting.start_backoff import StartBackoff
from bamboo_operator.signals.signals import lives

Json = Mapping[str, Any]

UNSCHEDULABLE = "Unschedulable"
GATED = "Gated"
IMAGE = "ImagePullBackOff"
LONGEST_REFUSAL = 1000
_BACK_OFF = re.compile(r'Back-off pulling image "[^"]*"(?:: )?')
_WAITING = {  # lasting reasons why a container waits -> the reported reason
    "ErrImagePull": IMAGE,
    "ImagePullBackOff": IMAGE,
    "InvalidImageName": "InvalidImageName",
    "ErrImageNeverPull": "ErrImageNeverPull",
    "ImageInspectError": "ImageInspectError",
    "CreateContainerConfigError": "CreateContainerConfigError",
    "CreateContainerError": "CreateContainerError",
    "RunContainerError": "RunContainerError",
}
_SILENT = (None, "ContainerCreating", "PodInitializing")  # reasons that do not explain the wait
HAS_SANDBOX = "PodReadyToStartContainers"


@dataclass(frozen=True, slots=True)
class StartupProblem:
    """Why a pod does not start."""

    reason: str  # CamelCase
    message: str  # a sentence


NO_EVENTS: Mapping[str, StartupProblem] = MappingProxyType({})


def missing_pods(
    count: int, backoff: StartBackoff | None, *, refused: str, pools_full: bool
) -> Iterator[StartupProblem]:
    """Yield why `count` workers have no pod. backoff: the wait, if it holds; refused: why the API server refused the
    newest pod.
    """
    if count and backoff:
        message = f"workers end before they have joined ({backoff.detail}); the next ones are requested"
        yield StartupProblem("StartBackOff", f"{message} {backoff.pause:g} s after the last")
    if count and refused:
        message = f"{count} worker(s) have no pod, which the API server refuses: {refused}"
        yield StartupProblem("PodsRefused", message[:LONGEST_REFUSAL])
    if pools_full:
        yield StartupProblem("PoolsFull", f"{count} worker(s) are not requested: every node pool is at its maxWorkers")


def is_unexplained(pod: Json) -> bool:
    """Return whether the pod is on a node and has started nothing, and its status does not say why.

    A pod that has its volumes and its network says so (PodReadyToStartContainers, from Kubernetes 1.29 on). Then its
    images are pulled, and its status shows all later problems.
    """
    status = pod.get("status") or {}
    if not lives(pod) or not (pod.get("spec") or {}).get("nodeName"):
        return False
    if any(c.get("type") == HAS_SANDBOX and c.get("status") == "True" for c in status.get("conditions") or ()):
        return False
    waiting = [_waiting(container) for container in _containers(status)]
    return all(found is not None and found.get("reason") in _SILENT for found in waiting)


def startup_problems(
    pods: Mapping[str, Json], events: Mapping[str, StartupProblem] = NO_EVENTS
) -> tuple[StartupProblem, ...]:
    """Return what keeps these workers, by name, from starting: one problem for each reason, with the first worker's
    message.

    events: problems by the pods' uids, for pods whose status does not show any. Workers at a gate come last, because
    they only wait, while the others need help.
    """
    found = [(name, problem) for name in sorted(pods) for problem in _of(pods[name], events)]
    count = Counter(problem.reason for _, problem in found)
    first = {problem.reason: (name, problem.message) for name, problem in reversed(found)}
    each = tuple(StartupProblem(reason, _sentence(reason, count[reason], *first[reason])) for reason in sorted(first))
    return (*each, *_held_back(pods))


def _sentence(reason: str, count: int, name: str, message: str) -> str:
    """Return a sentence on pods that do not start. name: the first of them, by which a user finds its pod."""
    what = "cannot be scheduled" if reason == UNSCHEDULABLE else "cannot start"
    return f"{count} worker(s) {what}: {message} ({name}{', ...' * (count > 1)})"


def _held_back(pods: Mapping[str, Json]) -> Iterator[StartupProblem]:
    held = [found for pod in pods.values() if lives(pod) and (found := gates_of(pod)) and not waits_for_quota(pod)]
    if held:
        names = ", ".join(sorted({name for found in held for name in found}))
        yield StartupProblem(GATED, f"{len(held)} worker(s) are held back by scheduling gates: {names}"[:500])


def _of(pod: Json, events: Mapping[str, StartupProblem]) -> Iterator[StartupProblem]:
    status = pod.get("status") or {}
    if not lives(pod) or gates_of(pod):
        return
    if (condition := _unschedulable(pod)) is not None:
        yield StartupProblem(UNSCHEDULABLE, str(condition.get("message") or "the scheduler gives no reason"))
        return
    event = events.get(pod["metadata"]["uid"]) if is_unexplained(pod) else None
    yield from islice((event,) if event else _stalled(status), 1)


def _unschedulable(pod: Json) -> Json | None:
    """Return the condition saying that the scheduler finds no node for the pod; None without it."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    found = (c for c in conditions if c.get("type") == "PodScheduled" and c.get("reason") == UNSCHEDULABLE)
    return next(found, None)


def _stalled(status: Json) -> Iterator[StartupProblem]:
    """Yield one problem for each container that cannot start."""
    for container in _containers(status):
        waiting = _waiting(container) or {}
        if reason := _WAITING.get(str(waiting.get("reason"))):
            yield StartupProblem(
                reason, _why(str(waiting["reason"]), waiting.get("message"), container.get("image"))[:500]
            )


def _containers(status: Json) -> list[Json]:
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _waiting(container: Json) -> Json | None:
    """Return the state in which a container waits; None if it has started."""
    found: Json | None = (container.get("state") or {}).get("waiting")
    return found


def _why(reason: str, message: Any, image: Any) -> str:
    """Return the kubelet's reason, the same text while it tries to pull an image and while it waits for the next
    attempt.

    While it waits, the kubelet writes that before its last error; kubelets before 1.32 leave out the error.
    """
    last_error = _BACK_OFF.sub("", str(message or ""), count=1) if reason == IMAGE else ""
    return last_error or f"{reason}: {message or image}"
