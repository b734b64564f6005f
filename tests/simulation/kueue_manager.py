"""A simulation of Kueue's integration of plain pods: its webhook and manager (0.18 to 0.19.2) for pods in a queue.

There is one ClusterQueue with BestEffortFIFO and `withinClusterQueue: LowerPriority`, whose quota counts pods. Missing:
cohorts, fair sharing, admission checks, topologies, waitForPodsReady.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

Json = dict[str, Any]
Order = tuple[Any, ...]

GROUP: Final = "kueue.x-k8s.io"
QUEUE, CLASS, MANAGED = f"{GROUP}/queue-name", f"{GROUP}/priority-class", f"{GROUP}/managed"
FINALIZER: Final = MANAGED
GATES: Final = (f"{GROUP}/admission", f"{GROUP}/topology")
ROLE_HASH: Final = f"{GROUP}/role-hash"


def defaulted(pod: Mapping[str, Any]) -> Json:
    """Return the pod as Kueue's webhook changes it on creation: a pod in a queue is marked and gated."""
    made = copy.deepcopy(dict(pod))
    metadata, spec = made["metadata"], made["spec"]
    if QUEUE not in (metadata.get("labels") or {}):
        return made
    metadata["labels"][MANAGED] = "true"
    metadata["annotations"] = {**(metadata.get("annotations") or {}), ROLE_HASH: "0"}
    metadata["finalizers"] = [*(metadata.get("finalizers") or ()), FINALIZER]
    spec["schedulingGates"] = [*(spec.get("schedulingGates") or ()), *({"name": name} for name in GATES)]
    return made


def waits(pod: Mapping[str, Any]) -> bool:
    return any(one["name"] in GATES for one in pod["spec"].get("schedulingGates") or ())


def without_gates(pod: Mapping[str, Any]) -> list[Json]:
    return [one for one in pod["spec"].get("schedulingGates") or () if one["name"] not in GATES]


def _has_ended(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _goes(pod: Mapping[str, Any]) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def is_managed(pod: Mapping[str, Any]) -> bool:
    return (pod["metadata"].get("labels") or {}).get(MANAGED) == "true"


def holds_quota(pod: Mapping[str, Any]) -> bool:
    """Return whether the pod uses quota. A pod that is being deleted uses none, though it may run for its grace
    period.
    """
    return is_managed(pod) and not waits(pod) and not _goes(pod) and not _has_ended(pod)


def queue_order(pod: Mapping[str, Any]) -> Order:
    """Return the sort key of a pod among pods of the same priority: creation time in whole seconds, then UID."""
    return pod["metadata"]["creationTimestamp"], pod["metadata"]["uid"]


@dataclass(frozen=True, slots=True)
class Finalize:
    """The removal of Kueue's finalizer from a pod that has ended or is being deleted."""

    pod: Json


@dataclass(frozen=True, slots=True)
class Admit:
    """The removal of Kueue's gates from a pod."""

    pod: Json


@dataclass(frozen=True, slots=True)
class Stop:
    """The eviction of a pod: the condition TerminationTarget, and a deletion with the pod's own grace period."""

    pod: Json
    reason: str
    message: str

    def condition(self, now: datetime) -> Json:
        return {
            "type": "TerminationTarget",
            "status": "True",
            "reason": self.reason,
            "message": self.message,
            "lastTransitionTime": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }


Action = Finalize | Admit | Stop


@dataclass(slots=True, kw_only=True)
class Outsider:
    """A workload of another application, whose pods are admitted together."""

    pods: int
    priority: int
    made: str
    admitted: bool = False


@dataclass(slots=True)
class Manager:
    """Kueue's manager, which admits and preempts pods.

    quota: in pods. classes: priorities by WorkloadPriorityClass. order: sort key of pods of the same priority. stopped:
    whether the ClusterQueue is drained: pods with quota are evicted, and no pod is admitted.
    """

    quota: int
    classes: Mapping[str, int] = field(default_factory=dict)
    order: Callable[[Mapping[str, Any]], Order] = queue_order
    stopped: bool = False
    outsiders: dict[str, Outsider] = field(default_factory=dict)
    admitted_at: dict[str, int] = field(default_factory=dict)  # by UID: the ordinal number of its admission
    log: list[str] = field(default_factory=list)

    def used(self, pods: Iterable[Mapping[str, Any]]) -> int:
        return sum(map(holds_quota, pods)) + sum(one.pods for one in self.outsiders.values() if one.admitted)

    def step(self, pods: Iterable[Mapping[str, Any]]) -> list[Action]:
        """Return the manager's next actions, given the pods in its caches, and mark the outsiders that it admits."""
        managed = [dict(pod) for pod in pods if is_managed(pod)]
        actions: list[Action] = [
            Finalize(pod)
            for pod in managed
            if FINALIZER in (pod["metadata"].get("finalizers") or ()) and (_goes(pod) or _has_ended(pod))
        ]
        holders = [pod for pod in managed if holds_quota(pod)]
        if self.stopped:
            why = "WorkloadEvictedDueToClusterQueueStopped"
            return [*actions, *(Stop(pod, why, "The ClusterQueue is stopped") for pod in holders)]
        waiting = [pod for pod in managed if waits(pod) and not _goes(pod) and self._priority(pod) is not None]
        queue: list[tuple[Order, Json | str]] = [
            ((-(self._priority(pod) or 0), *self.order(pod)), pod) for pod in waiting
        ]
        for name, one in self.outsiders.items():
            if not one.admitted:
                queue.append(((-one.priority, one.made, name), name))
        free, victims = self.quota - self.used(managed), list[Json]()
        for _, one in sorted(queue, key=lambda entry: entry[0]):
            asked = self.outsiders[one].pods if isinstance(one, str) else 1
            if asked <= free:
                free -= asked
                self._admit(one, actions)
                continue
            priority = self.outsiders[one].priority if isinstance(one, str) else self._priority(one) or 0
            found = self._victims(priority, [pod for pod in holders if pod not in victims], asked - free)
            for pod in found:
                name = one if isinstance(one, str) else one["metadata"]["name"]
                message = f"Preempted to accommodate a workload of {name} due to prioritization in the ClusterQueue"
                actions.append(Stop(pod, "WorkloadEvictedDueToPreempted", message))
                self.log.append(f"{pod['metadata']['name']} is preempted for {name}")
            victims += found
            if found:
                free = 0  # what becomes free is the preemptor's
        return actions

    def _admit(self, one: Json | str, actions: list[Action]) -> None:
        if isinstance(one, str):
            self.outsiders[one].admitted = True
            self.log.append(f"{one} is admitted")
            return
        self.admitted_at[one["metadata"]["uid"]] = len(self.admitted_at)
        actions.append(Admit(one))
        self.log.append(f"{one['metadata']['name']} is admitted")

    def _victims(self, priority: int, holders: list[Json], lacking: int) -> list[Json]:
        """Return the pods to preempt, by lowest priority, then newest admission; none if they do not suffice."""
        lower = [pod for pod in holders if (self._priority(pod) or 0) < priority]
        lower.sort(key=lambda pod: (self._priority(pod), -self.admitted_at.get(pod["metadata"]["uid"], -1)))
        return lower[:lacking] if lacking <= len(lower) else []

    def _priority(self, pod: Mapping[str, Any]) -> int | None:
        """Return a pod's priority: 0 without a class; None if its class does not exist, so that it has no Workload."""
        name = pod["metadata"]["labels"].get(CLASS)
        return 0 if name is None else self.classes.get(name)
