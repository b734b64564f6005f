"""Parsing of a job's pods, nodes and events from the API server."""

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from bamboo.terminal.snapshot import JobEvent, RemoteWorker
from bamboo_core import names
from bamboo_core.job.api_object import ApiPart, Metadata, Time, read_api_part
from bamboo_core.job.status import ReportedCondition
from bamboo_core.view.job_view import JobView

Json = Mapping[str, Any]


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


def workers_of(job: JobView, pods: Iterable[Json], nodes: Mapping[str, Json] | None = None) -> tuple[RemoteWorker, ...]:
    """Return the workers whose pods this job controls, sorted by number. nodes: by name, for the workers' zones."""
    mine = (pod for body in pods if _owner(pod := read_api_part(Pod, body)) == job.uid)
    return tuple(sorted((_worker(job, pod, nodes or {}) for pod in mine), key=lambda w: (w.number, w.name)))


def events_of(job: JobView, of_job: Iterable[Json], of_pods: Iterable[Json], pods: Iterable[str]) -> list[JobEvent]:
    """Return the events of the job and of its pods, including deleted pods, oldest first.

    Events of an earlier job of the same name are left out: events from before this job's creation, and events that name
    a BambooJob with another UID. pods: names of the job's pods.
    """
    known = set(pods)
    mine = [event for body in of_job if (event := read_api_part(Event, body)).involved_object.uid in ("", job.uid)]
    for body in of_pods:
        name = (event := read_api_part(Event, body)).involved_object.name
        if name in known or is_worker_of(job.name, name):
            mine.append(event)
    events = [_event(event) for event in mine]
    created = job.metadata.creation_timestamp
    return sorted((e for e in events if created is None or e.at >= created), key=lambda e: (e.at, e.order))


def is_worker_of(job: str, pod: str) -> bool:
    """Return whether a pod's name is the name of a worker of the job."""
    number = re.search(r"-w([0-9]{1,9})$", pod)
    return number is not None and names.worker_name(job, int(number[1])) == pod


def _owner(pod: Pod) -> str | None:
    return next((o.uid for o in pod.metadata.owner_references if o.controller and o.kind == names.KIND), None)


def _worker(job: JobView, pod: Pod, nodes: Mapping[str, Json]) -> RemoteWorker:
    name, labels, node = pod.metadata.name, pod.metadata.labels, pod.spec.node_name
    state, detail = _state(job, pod)
    grace = pod.spec.termination_grace_period_seconds
    number = labels.get(names.LABEL_WORKER_INDEX, "")
    placed = read_api_part(Metadata, nodes[node]["metadata"] if node in nodes else {})
    return RemoteWorker(
        name=name,
        uid=pod.metadata.uid,
        number=int(number) if number.isdecimal() else 0,
        state=state,
        detail=detail,
        cells=job.cells(name),
        node=node,
        zone=placed.labels.get(names.LABEL_ZONE, ""),
        capacity=labels.get(names.LABEL_CAPACITY_TYPE, ""),
        pool=labels.get(names.LABEL_NODE_POOL, ""),
        created=pod.metadata.creation_timestamp,
        grace_seconds=names.GRACE_SECONDS if grace is None else grace,
    )


def _state(job: JobView, pod: Pod) -> tuple[str, str]:
    status, name = pod.status, pod.metadata.name
    trainer = next((c.state for c in status.container_statuses if c.name == names.TRAINER_CONTAINER), ContainerState())
    if ended := trainer.terminated:
        code = ended.exit_code
        return ("ended", "") if code == 0 else ("failed", f"{ended.reason or 'Error'}, exit code {code}")
    if status.phase in ("Succeeded", "Failed"):
        return "ended" if status.phase == "Succeeded" else "failed", status.reason
    if pod.metadata.deletion_timestamp:
        return "leaving", "its pod is being deleted"
    if trainer.running is not None:
        return ("training" if job.cells(name) else "standby" if job.plan else "waiting"), ""
    for condition in status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False":
            return "pending", condition.message or condition.reason
    if not pod.spec.node_name:
        return "pending", ""
    texts = [text for text in (trainer.waiting.reason, trainer.waiting.message) if text]
    return "starting", ": ".join(texts if texts != ["ContainerCreating"] else [])


def _event(event: Event) -> JobEvent:
    times = (
        event.last_timestamp,
        event.series.last_observed_time,
        event.event_time,
        event.metadata.creation_timestamp,
    )
    version = event.metadata.resource_version
    return JobEvent(
        uid=event.metadata.uid,
        at=next((time for time in times if time), datetime.fromtimestamp(0, UTC)),
        order=int(version) if version.isdecimal() else 0,
        about=event.involved_object.name,
        reason=event.reason,
        message=" ".join(event.message.split()),
        warning=event.type == "Warning",
        count=event.series.count or event.count or 1,
    )
