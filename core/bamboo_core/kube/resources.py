"""What the command line reads of pods, nodes and events. Other fields are skipped; null is absent."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from bamboo_core.job.api_object import ApiPart, Metadata, Time
from bamboo_core.kube.errors import RemoteError
from bamboo_core.kube.request_parts import without_nulls

T = TypeVar("T")


class StatusCondition(ApiPart, frozen=True):
    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: Time | None = None


class PodSpec(ApiPart, frozen=True):
    node_name: str = ""
    termination_grace_period_seconds: int | None = None


class ContainerTerminated(ApiPart, frozen=True):
    exit_code: int = 0
    reason: str = ""


class ContainerWaiting(ApiPart, frozen=True):
    reason: str = ""
    message: str = ""


class ContainerState(ApiPart, frozen=True):
    terminated: ContainerTerminated | None = None
    running: dict[str, Any] | None = None
    waiting: ContainerWaiting = ContainerWaiting()


class ContainerStatus(ApiPart, frozen=True):
    name: str
    state: ContainerState = ContainerState()


class PodStatus(ApiPart, frozen=True):
    phase: str = ""
    reason: str = ""
    conditions: tuple[StatusCondition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(ApiPart, frozen=True):
    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class Node(ApiPart, frozen=True):
    metadata: Metadata


class ObjectReference(ApiPart, frozen=True):
    name: str = ""
    uid: str = ""


class EventSeries(ApiPart, frozen=True):
    count: int = 0
    last_observed_time: Time | None = None


class Event(ApiPart, frozen=True):
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
