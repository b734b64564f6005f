"""What the command line reads of the objects that an API server sends. Other fields are skipped; null is absent."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from bamboo_core.job.status import BambooJobStatus, Time
from bamboo_core.kube.errors import RemoteError
from bamboo_core.kube.request_parts import without_nulls

T = TypeVar("T")


class Part(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A part of an object of the API, or a whole one. Attributes are the API's fields in snake_case; what may be absent
    has a default.
    """


class OwnerReference(Part, frozen=True):
    kind: str
    uid: str
    controller: bool = False


class Metadata(Part, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: Time | None = None
    deletion_timestamp: Time | None = None
    labels: dict[str, str] = {}
    owner_references: tuple[OwnerReference, ...] = ()


class StatusCondition(Part, frozen=True):
    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: Time | None = None


# BambooJob


class JobTopology(Part, frozen=True):
    pipelines: int = 1


class JobTraining(Part, frozen=True):
    steps: int = 0


class JobSpread(Part, frozen=True):
    topology_key: str = "topology.kubernetes.io/zone"


class JobRedundancy(Part, frozen=True):
    mode: str = ""
    replicas: int = 1


class ClaimReference(Part, frozen=True):
    claim_name: str = ""


class JobStorage(Part, frozen=True):
    uri: str | None = None
    persistent_volume_claim: ClaimReference = ClaimReference()


class JobCheckpoint(Part, frozen=True):
    storage: JobStorage = JobStorage()


class JobRollout(Part, frozen=True):
    paused: bool = False


class JobPool(Part, frozen=True):
    name: str = ""
    price_per_hour: str | None = None
    machine: str | None = None


class BambooJobSpec(Part, frozen=True):
    suspend: bool = False
    topology: JobTopology = JobTopology()
    training: JobTraining = JobTraining()
    spread: JobSpread = JobSpread()
    redundancy: JobRedundancy = JobRedundancy()
    checkpoint: JobCheckpoint | None = None
    rollout: JobRollout = JobRollout()
    node_pools: tuple[JobPool, ...] = ()


class BambooJob(Part, frozen=True):
    metadata: Metadata
    spec: BambooJobSpec = BambooJobSpec()
    status: BambooJobStatus = BambooJobStatus()


# Pod, Node, Event


class PodSpec(Part, frozen=True):
    node_name: str = ""
    termination_grace_period_seconds: int | None = None


class ContainerTerminated(Part, frozen=True):
    exit_code: int = 0
    reason: str = ""


class ContainerWaiting(Part, frozen=True):
    reason: str = ""
    message: str = ""


class ContainerState(Part, frozen=True):
    terminated: ContainerTerminated | None = None
    running: dict[str, Any] | None = None
    waiting: ContainerWaiting = ContainerWaiting()


class ContainerStatus(Part, frozen=True):
    name: str
    state: ContainerState = ContainerState()


class PodStatus(Part, frozen=True):
    phase: str = ""
    reason: str = ""
    conditions: tuple[StatusCondition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(Part, frozen=True):
    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class Node(Part, frozen=True):
    metadata: Metadata


class ObjectReference(Part, frozen=True):
    name: str = ""
    uid: str = ""


class EventSeries(Part, frozen=True):
    count: int = 0
    last_observed_time: Time | None = None


class Event(Part, frozen=True):
    """Three generations of the API keep the time in different fields."""

    metadata: Metadata
    involved_object: ObjectReference = ObjectReference()
    type: str = ""
    reason: str = ""
    message: str = ""
    count: int = 0
    series: EventSeries = EventSeries()
    last_timestamp: Time | None = None
    event_time: Time | None = None


def read(kind: type[T], body: Mapping[str, Any]) -> T:
    """The object as that kind. Raises RemoteError naming the field that is of another type."""
    try:
        return msgspec.convert(without_nulls(body), kind)
    except msgspec.ValidationError as error:
        name = (body.get("metadata") or {}).get("name")
        raise RemoteError(f"cannot read {kind.__name__} {name} as the API server sends it: {error}") from None
