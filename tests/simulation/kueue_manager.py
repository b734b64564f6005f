"""A stand-in for Kueue's manager, in our own words: what its documentation says becomes of Workloads in one queue.

It counts pods, and knows no cohorts or admission checks, and of topologies one level. Where Kueue is at hand its own
manager shows the same (`BAMBOO_KUEUE`, docs/testing-cluster.md). Quota, all or nothing, partial admission, preemption
by priority, slices, eviction of what is not ready, and which changes its webhooks refuse.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

Json = dict[str, Any]
GROUP = "kueue.x-k8s.io"
ELASTIC = f"{GROUP}/elastic-job"
REPLACES = f"{GROUP}/workload-slice-replacement-for"


def holds(workload: Mapping[str, Any], kind: str) -> bool:
    found = (workload.get("status") or {}).get("conditions") or ()
    return any(one["type"] == kind and one["status"] == "True" for one in found)


def name_of(workload: Mapping[str, Any]) -> str:
    return f"{workload['metadata']['namespace']}/{workload['metadata']['name']}"


def is_elastic(workload: Mapping[str, Any]) -> bool:
    return (workload["metadata"].get("annotations") or {}).get(ELASTIC) == "true"


def counts(workload: Mapping[str, Any]) -> dict[str, int]:
    return {one["name"]: int(one["count"]) for one in workload["spec"]["podSets"]}


def usage(workload: Mapping[str, Any]) -> int:
    """The pods whose quota it holds."""
    status = workload.get("status") or {}
    if not holds(workload, "QuotaReserved") or holds(workload, "Finished"):
        return 0
    given_up = {one["name"]: int(one["count"]) for one in status.get("reclaimablePods") or ()}
    asked = counts(workload)
    assigned = {one["name"]: int(one["count"]) for one in status["admission"]["podSetAssignments"]}
    return sum(min(count, asked[name] - given_up.get(name, 0)) for name, count in assigned.items())


def refusal(before: Mapping[str, Any] | None, after: Mapping[str, Any], *, slices: bool = True) -> str:
    """Why the webhook refuses a Workload, or a change of it; "" if it does not."""
    sets = after["spec"]["podSets"]
    if is_elastic(after) and any("minCount" in one for one in sets) and slices:
        return "partial admission and elastic job cannot be used together"
    if any(one.get("minCount", 0) > one["count"] for one in sets):
        return "minCount should be positive and less or equal to count"
    reserved = holds(after, "QuotaReserved")
    if reserved and not (after.get("status") or {}).get("admission"):
        return "admission must be set while the QuotaReserved condition is true"
    if before is None or not holds(before, "QuotaReserved"):
        return ""
    then = [{**one, "count": 0} for one in before["spec"]["podSets"]]
    if [{**one, "count": 0} for one in sets] != then:
        return "podSets: field is immutable"
    larger = [name for name, count in counts(after).items() if count > counts(before)[name]]
    smaller = [name for name, count in counts(after).items() if count < counts(before)[name]]
    if larger or (smaller and not slices):
        return "podSets: field is immutable"
    old, new = ((one.get("status") or {}).get("reclaimablePods") or () for one in (before, after))
    less = {one["name"]: one["count"] for one in new}
    if reserved and any(less.get(one["name"], 0) < one["count"] for one in old):
        return "reclaimablePods: cannot be less than before"
    return ""


@dataclass(slots=True)
class Manager:
    """quota: pods. flavor: in which all are admitted. slices: may Workloads replace each other? ready_seconds: for an
    admitted Workload to be ready; None: for ever. cause: why it deactivates Workloads itself, such as
    DueToRequeuingLimitExceeded; "": others do.
    """

    quota: int
    flavor: str = "default"
    slices: bool = True
    ready_seconds: float | None = None
    cause: str = ""
    racks: Mapping[str, int] = field(default_factory=dict)  # the room in each domain of the topology's only level
    log: list[str] = field(default_factory=list)

    def step(self, workloads: Iterable[Mapping[str, Any]], now: datetime) -> list[Json]:
        """The Workloads that change, as they are from now on."""
        given = {name_of(one): one for one in workloads}
        there: dict[str, Json] = {name: copy.deepcopy(dict(one)) for name, one in given.items()}
        live = [one for one in there.values() if not holds(one, "Finished")]
        for one in live:
            self._evict_if_due(one, now)
        waiting = [one for one in live if not holds(one, "QuotaReserved") and one["spec"].get("active") is not False]
        for one in sorted(waiting, key=_order):
            if self._admit(one, there, now) == "waits for those that it preempts":
                break
        return [one for name, one in there.items() if one != given[name]]

    def used(self, workloads: Iterable[Mapping[str, Any]]) -> int:
        return sum(map(usage, workloads))

    def _evict_if_due(self, one: Json, now: datetime) -> None:
        if not holds(one, "QuotaReserved") or holds(one, "Evicted"):
            return
        if one["spec"].get("active") is False:
            self._evict(one, f"Deactivated{self.cause}", "the Workload is deactivated", now)
        elif self.ready_seconds is not None and not holds(one, "PodsReady"):
            since = next(c["lastTransitionTime"] for c in one["status"]["conditions"] if c["type"] == "Admitted")
            if now - datetime.fromisoformat(since) > timedelta(seconds=self.ready_seconds):
                self._evict(one, "PodsReadyTimeout", f"not ready within {self.ready_seconds:g} s", now)

    def _admit(self, one: Json, there: Mapping[str, Json], now: datetime) -> str:
        """Admits it, if there is quota; else takes it from less important ones. What became of it."""
        replaced = there.get((one["metadata"].get("annotations") or {}).get(REPLACES, "")) if self.slices else None
        if replaced is not None and (not holds(replaced, "QuotaReserved") or holds(replaced, "Finished")):
            replaced = None
        assert replaced is None or counts(replaced).keys() == counts(one).keys(), "it subtracts set by set"
        others = [other for other in there.values() if other is not replaced]
        free, asked = self.quota - self.used(others), sum(counts(one).values())
        least = asked - sum(p["count"] - p["minCount"] for p in one["spec"]["podSets"] if "minCount" in p)
        if least <= free:
            self._reserve(one, asked - min(asked, free), now)
            if replaced is not None:
                _set(replaced, "Finished", True, "WorkloadSliceReplaced", f"replaced by {name_of(one)}", now)
                self.log.append(f"{name_of(replaced)} replaced by {name_of(one)}")
            return "admitted"
        victims = self._victims(one, [other for other in others if usage(other)], asked - free)
        if victims is None:
            if not holds(one, "QuotaReserved"):
                told = f"couldn't assign flavors to pod set: insufficient unused quota, {asked - free} more needed"
                _set(one, "QuotaReserved", False, "Pending", told, now)
            return "does not fit"
        for victim in victims:
            if not holds(victim, "Evicted"):
                self._evict(victim, "Preempted", f"preempted to accommodate {name_of(one)}", now)
        _set(one, "QuotaReserved", False, "Pending", "waits for preempted Workloads", now)
        return "waits for those that it preempts"

    def _victims(self, one: Json, admitted: list[Json], lacking: int) -> list[Json] | None:
        """Which less important ones suffice, those first that are evicted already; None if all of them do not."""
        lower = [w for w in admitted if w["spec"].get("priority", 0) < one["spec"].get("priority", 0)]
        chosen: list[Json] = []
        for victim in sorted(lower, key=lambda w: (not holds(w, "Evicted"), w["spec"].get("priority", 0))):
            if lacking <= 0:
                break
            chosen.append(victim)
            lacking -= usage(victim)
        return chosen if lacking <= 0 else None

    def _reserve(self, one: Json, fewer: int, now: datetime) -> None:
        """fewer: pods less than asked for, of the pod set with a minCount."""
        assignments = []
        for pods in one["spec"]["podSets"]:
            count = pods["count"] - (fewer if "minCount" in pods else 0)
            assignment = {"name": pods["name"], "count": count, "flavors": {"pods": self.flavor}}
            if "topologyRequest" in pods:
                assignment["topologyAssignment"] = self._domains(pods["topologyRequest"], count)
            assignments.append(assignment)
        one.setdefault("status", {})["admission"] = {"clusterQueue": "queue", "podSetAssignments": assignments}
        _set(one, "QuotaReserved", True, "QuotaReserved", "Quota reserved", now)
        if holds(one, "Evicted"):
            _set(one, "Evicted", False, "QuotaReserved", "Previously: evicted", now)
        _set(one, "Admitted", True, "Admitted", "The workload is admitted", now)
        self.log.append(f"{name_of(one)} admitted with {usage(one)}")

    def _domains(self, asked: Mapping[str, Any], count: int) -> Json:
        """In the first racks that have room, slice by slice; whatever others have there. Kueue admits none without."""
        level = asked.get("required") or asked.get("podSetSliceRequiredTopology") or "rack"
        size = count if "required" in asked else asked.get("podSetSliceSize", 1)
        left, found = dict(self.racks), dict.fromkeys(self.racks, 0)
        for _ in range(count // size):
            rack = next(name for name, room in left.items() if room >= size)
            left[rack] -= size
            found[rack] += size
        taken = {rack: number for rack, number in found.items() if number}
        values = [{"individual": {"roots": list(taken)}}]
        one = {"domainCount": len(taken), "valuesPerLevel": values, "podCounts": {"individual": list(taken.values())}}
        return {"levels": [level], "slices": [one]}

    def _evict(self, one: Json, reason: str, message: str, now: datetime) -> None:
        _set(one, "Evicted", True, reason, message, now)
        self.log.append(f"{name_of(one)} evicted: {reason}")


def _order(one: Mapping[str, Any]) -> tuple[int, str, str]:
    return -one["spec"].get("priority", 0), one["metadata"].get("creationTimestamp", ""), one["metadata"]["name"]


def _set(one: Json, kind: str, status: bool, reason: str, message: str, now: datetime) -> None:
    conditions = one.setdefault("status", {}).setdefault("conditions", [])
    before = next((c for c in conditions if c["type"] == kind), None)
    found = {"type": kind, "status": str(status), "reason": reason, "message": message}
    if before is not None and all(before[key] == value for key, value in found.items()):
        return
    since = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    if before is not None and before["status"] == found["status"]:
        since = before["lastTransitionTime"]
    others = [c for c in conditions if c["type"] != kind]
    one["status"]["conditions"] = [*others, {**found, "lastTransitionTime": since}]
