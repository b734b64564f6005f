"""The fields of pods and events that the command line reads."""

from typing import Any

from bamboo_core.job.api_object import ApiPart, Metadata, Time
from bamboo_core.job.status import ReportedCondition


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
    name: str = ""
    state: ContainerState = ContainerState()


class PodStatus(ApiPart, frozen=True):
    phase: str = ""
    reason: str = ""
    conditions: tuple[ReportedCondition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(ApiPart, frozen=True):
    metadata: Metadata = Metadata()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class ObjectReference(ApiPart, frozen=True):
    name: str = ""
    uid: str = ""


class EventSeries(ApiPart, frozen=True):
    count: int = 0
    last_observed_time: Time | None = None


class Event(ApiPart, frozen=True):
    """A Kubernetes event. Three generations of the API keep its time in different fields."""

    metadata: Metadata = Metadata()
    involved_object: ObjectReference = ObjectReference()
    type: str = ""
    reason: str = ""
    message: str = ""
    count: int = 0
    series: EventSeries = EventSeries()
    last_timestamp: Time | None = None
    event_time: Time | None = None
