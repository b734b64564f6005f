"""An informer cache of the jobs' Workloads."""

from collections.abc import Mapping
from typing import Any

from bamboo_core.kube.request_parts import Object
from bamboo_operator.kube.objects import JobKey, job_of, owner_uid


class WorkloadCache:
    """Fed by a watch, and by the API server's answers to what the operator changes. version: of the API that serves
    Workloads; None: none are served, or none are to be used.
    """

    def __init__(self, version: str | None = None) -> None:
        self.version = version
        self._things: dict[tuple[str, str], Object] = {}  # by namespace and name

    def of(self, job: JobKey, uid: str) -> list[Object]:
        """The Workloads of that very job."""
        return [one for one in self._things.values() if job_of(one) == job and owner_uid(one) == uid]

    def put(self, workload: Mapping[str, Any]) -> None:
        """As the API server has it now, or had it: what the watch tells may be older than an answer."""
        metadata = workload["metadata"]
        key = (metadata["namespace"], metadata["name"])
        known = (self._things.get(key) or {}).get("metadata") or {}
        if known.get("uid") != metadata["uid"] or _number(metadata) >= _number(known):
            self._things[key] = dict(workload)

    def forget(self, key: tuple[str, str], uid: str | None = None) -> None:
        """It is gone. uid: only if it is that one."""
        known = self._things.get(key)
        if known is not None and uid in (None, known["metadata"]["uid"]):
            del self._things[key]

    def uids(self) -> dict[tuple[str, str], str]:
        return {key: str(one["metadata"]["uid"]) for key, one in self._things.items()}


def _number(metadata: Mapping[str, Any]) -> int:
    """The resourceVersion, which grows with every change of the object."""
    text = str(metadata.get("resourceVersion") or "")
    return int(text) if text.isdecimal() else 0
