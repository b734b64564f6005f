"""The runtimes of the cluster, as watches show them, and what their status says."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from bamboo_core.job.api_object import read_leniently, whole_seconds, written
from bamboo_core.job.fields import ManifestError
from bamboo_core.job.runtime import Runtime, parse_runtime
from bamboo_core.job.spec import RuntimeKind, RuntimeRef
from bamboo_core.job.status import BambooRuntimeStatus, ReportedCondition
from bamboo_core.kube.errors import ApiError
from bamboo_core.names import API_VERSION
from bamboo_operator.kube.attempts import ApiAttempts
from bamboo_operator.kube.client import API_ERRORS, ApiClient, described
from bamboo_operator.kube.objects import utc_now

logger = logging.getLogger(__name__)

MOST_PROBLEMS = 20  # told of one runtime


class RuntimeKey(NamedTuple):
    """namespace: "" for a runtime of the cluster."""

    kind: str
    namespace: str
    name: str


def key_of(ref: RuntimeRef, namespace: str) -> RuntimeKey:
    """The runtime that a job of that namespace names."""
    return RuntimeKey(str(ref.kind), namespace if ref.kind is RuntimeKind.NAMESPACE else "", ref.name)


@dataclass(frozen=True, slots=True)
class FoundRuntime:
    """A runtime that there is. runtime: None if it cannot be read; problems: then why."""

    uid: str
    runtime: Runtime | None
    problems: tuple[str, ...]


async def listable_kinds(api: ApiClient, namespace: str) -> tuple[RuntimeKind, ...]:
    """The kinds that may be listed, and so watched; that others may not is said once. An older chart's rights know no
    runtimes, and kopf begins with no job before it has listed all that it watches. namespace: one in which jobs are
    followed; "": all are.
    """
    found = []
    for kind in RuntimeKind:
        try:
            await api.list_runtimes(kind, namespace if kind is RuntimeKind.NAMESPACE else "")
        except API_ERRORS as error:
            if isinstance(error, ApiError) and error.status == 403:
                logger.warning("no %s is followed: %s", kind, error)
                continue
            logger.warning("cannot see whether each %s may be followed: %s", kind, described(error))
        found.append(kind)
    return tuple(found)


class RuntimeCache:
    """Fed by watches. kinds: those that are watched. changed: told of a runtime that is another one for its jobs than
    before.
    """

    def __init__(self, api: ApiClient, kinds: Collection[RuntimeKind] = tuple(RuntimeKind)) -> None:
        self._api, self.kinds = api, kinds
        self._found: dict[RuntimeKey, FoundRuntime] = {}
        self._writing: dict[RuntimeKey, asyncio.Task[None]] = {}
        self.changed: Callable[[RuntimeKey], None] = lambda key: None  # who is told, once there is somebody

    def get(self, key: RuntimeKey) -> FoundRuntime | None:
        """None if there is none."""
        return self._found.get(key)

    def uids(self) -> dict[RuntimeKey, str]:
        return {key: found.uid for key, found in self._found.items()}

    def listed(self, kind: RuntimeKind, body: Mapping[str, Any]) -> None:
        """It was listed beside the watch, which may have reported more before that."""
        metadata = body["metadata"]
        if RuntimeKey(str(kind), metadata.get("namespace") or "", metadata["name"]) not in self._found:
            self.event(kind, "ADDED", body)

    def event(self, kind: RuntimeKind, event: str | None, body: Mapping[str, Any]) -> None:
        """Takes in a change of a runtime. event: ADDED, MODIFIED, DELETED, or None for what was there before."""
        metadata = body["metadata"]
        key = RuntimeKey(str(kind), metadata.get("namespace") or "", metadata["name"])
        known = self._found.get(key)
        if event == "DELETED":
            if known is not None and known.uid == metadata["uid"]:
                self.forget(key)
            return
        self._found[key] = found = _read(key, body)
        if found != known:  # only then: another operator may find otherwise, and they would write in turn for ever
            self._write_later(key, body, found)
            self.changed(key)

    def forget(self, key: RuntimeKey) -> None:
        """There is none of that name any more."""
        if self._found.pop(key, None) is not None:
            self.changed(key)
        if writing := self._writing.pop(key, None):
            writing.cancel()

    async def stop(self) -> None:
        writing = tuple(self._writing.values())
        for task in writing:
            task.cancel()
        await asyncio.gather(*writing, return_exceptions=True)

    def _write_later(self, key: RuntimeKey, body: Mapping[str, Any], found: FoundRuntime) -> None:
        """Writes the status until it is there, unless a newer one is to be written."""
        before = read_leniently(BambooRuntimeStatus, body.get("status"))
        status = runtime_status(before, found, int(body["metadata"].get("generation") or 0))
        if earlier := self._writing.pop(key, None):
            earlier.cancel()
        if status != before:
            self._writing[key] = asyncio.create_task(self._write(key, found.uid, status), name=f"status of {key.name}")

    async def _write(self, key: RuntimeKey, uid: str, status: BambooRuntimeStatus) -> None:
        attempts = ApiAttempts((key.namespace, key.name))
        what = f"write the status of {key.kind} {key.name}"

        async def write() -> None:
            await self._api.write_runtime_status(key.kind, key.namespace, key.name, uid, written(status))

        if refused := await attempts.until_done(what, write, ends=(403, 404, 409)):
            logger.warning("cannot %s: %s", what, refused)


def _read(key: RuntimeKey, body: Mapping[str, Any]) -> FoundRuntime:
    metadata = {name: body["metadata"].get(name) for name in ("name", "namespace", "generation")}
    uid, spec = str(body["metadata"]["uid"]), body.get("spec")
    try:
        runtime = parse_runtime({"apiVersion": API_VERSION, "kind": key.kind, "metadata": metadata, "spec": spec or {}})
    except ManifestError as error:
        return FoundRuntime(uid, None, tuple(map(str, error.problems))[:MOST_PROBLEMS])
    return FoundRuntime(uid, runtime, ())


def runtime_status(before: BambooRuntimeStatus, found: FoundRuntime, generation: int) -> BambooRuntimeStatus:
    """The status to be written. before: the one that there is. What has not changed keeps its time."""
    holds = "False" if found.problems else "True"
    told = next((one for one in before.conditions if one.type == "Accepted"), None)
    since = told.last_transition_time if told and told.status == holds else None
    accepted = ReportedCondition(
        type="Accepted",
        status=holds,
        observed_generation=generation,
        last_transition_time=since or whole_seconds(utc_now()),
        reason="InvalidSpec" if found.problems else "Accepted",
        message="; ".join(found.problems) or "jobs can be run with it",
    )
    return BambooRuntimeStatus(observed_generation=generation, conditions=(accepted,))
