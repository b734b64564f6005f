"""What the API server says of jobs, workers and events, as the command line sees it. Raw objects in, facts out."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bamboo import names
from bamboo.coordinator.protection import OFF
from bamboo.names import EXIT_FAILED, EXIT_OK, EXIT_UNRECOVERABLE

Json = Mapping[str, Any]
CellIndex = tuple[int, int]  # pipeline and stage

UNRECOVERABLE = ("StageLost", "WorkersGone")  # reasons with which a job fails that nothing could have saved
USUAL = {
    "Accepted": True,
    "WorkersReady": True,
    "Running": True,
    "Protected": True,
}  # conditions that are not False when all is well


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCondition:
    kind: str
    holds: bool
    reason: str
    message: str
    since: datetime | None

    @property
    def usual(self) -> bool:
        """Is it as it is when all is well, or when the job is over or suspended, which another condition says?"""
        idle = self.reason == "JobOver" or (self.reason == "Suspended" and not self.holds)
        return idle or self.reason == OFF or self.holds is USUAL.get(self.kind, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastTakeover:
    time: str
    victim: str
    worker: str
    pipeline: int
    stage: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteJob:
    """plan: owners by pipeline and stage. What is not known (yet) is None, or a count of 0."""

    namespace: str
    name: str
    uid: str
    generation: int
    created: datetime | None
    suspend: bool
    managed_by: str
    stages: int
    pipelines: int
    standby: int
    topology_key: str
    redundancy: str
    checkpoints: bool
    state: str
    conditions: tuple[JobCondition, ...]
    epoch: int
    pipelines_ready: int
    workers_ready: int
    workers_wanted: int
    spot: int
    on_demand: int
    preemptions: int
    takeovers: int
    restarts: int
    last_takeover: LastTakeover | None
    step: int
    steps: int
    loss: float | None
    samples_per_second: float | None
    eta_seconds: float | None
    reported: datetime | None
    checkpoint_step: int | None
    cost: str | None
    cost_per_hour: str | None
    saved: str | None
    plan: tuple[tuple[str, ...], ...]

    def condition(self, kind: str) -> JobCondition | None:
        return next((c for c in self.conditions if c.kind == kind), None)

    def holds(self, kind: str) -> bool:
        found = self.condition(kind)
        return found is not None and found.holds

    @property
    def ended(self) -> JobCondition | None:
        """The condition with which the job is over."""
        return next((c for c in self.conditions if c.kind in ("Complete", "Failed") and c.holds), None)

    @property
    def exit_code(self) -> int | None:
        """As `bamboo run` would have ended; None while the job is not over."""
        end = self.ended
        if end is None:
            return None
        if end.kind == "Complete":
            return EXIT_OK
        return EXIT_UNRECOVERABLE if end.reason in UNRECOVERABLE else EXIT_FAILED

    @property
    def protected(self) -> bool:
        """Has every stage what is meant to protect it?

        Without the condition Protected, as an older operator has it, Degraded names three faults at most, and more
        may hide others.
        """
        if told := self.condition("Protected"):
            return told.holds or told.reason == OFF
        degraded = self.condition("Degraded")
        if degraded is None or not degraded.holds:
            return True
        return not any(sign in degraded.message for sign in ("has no second copy", "; and "))

    def short(self, worker: str) -> str:
        """A worker's name without the job's, where it has that: w3 for quickstart-w3."""
        return worker.removeprefix(f"{self.name}-")

    def cells(self, worker: str) -> tuple[CellIndex, ...]:
        """What the worker runs."""
        return tuple((d, s) for d, row in enumerate(self.plan) for s, owner in enumerate(row) if owner == worker)

    @property
    def doubled(self) -> set[str]:
        """Workers that run more than one stage."""
        return {worker for row in self.plan for worker in row if len(self.cells(worker)) > 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteWorker:
    """state: pending, starting, waiting, training, spare, leaving, ended or failed; detail: why, if that is known."""

    name: str
    uid: str
    number: int
    state: str
    detail: str
    cells: tuple[CellIndex, ...]
    node: str
    zone: str
    capacity: str
    pool: str
    created: datetime | None
    grace_seconds: int

    @property
    def alive(self) -> bool:
        return self.state not in ("ended", "failed")

    @property
    def has_log(self) -> bool:
        return self.state not in ("pending", "starting")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """An event. about: the job's or a pod's name."""

    uid: str
    at: datetime
    order: int
    about: str
    reason: str
    message: str
    warning: bool
    count: int


def job_of(body: Json) -> RemoteJob:
    """From a BambooJob. Without a status yet, it is Pending."""
    metadata, spec, status = _object(body, "metadata"), _object(body, "spec"), _object(body, "status")
    topology, training = _object(spec, "topology"), _object(status, "training")
    pipelines, workers, cost = _object(status, "pipelines"), _object(status, "workers"), _object(status, "cost")
    return RemoteJob(
        namespace=str(metadata.get("namespace")),
        name=str(metadata.get("name")),
        uid=str(metadata.get("uid")),
        generation=int(metadata.get("generation") or 0),
        created=time_of(metadata.get("creationTimestamp")),
        suspend=bool(spec.get("suspend")),
        managed_by=str(spec.get("managedBy") or ""),
        stages=int(topology.get("stages") or 0),
        pipelines=int(topology.get("pipelines") or 1),
        standby=int(_object(spec, "standby").get("workers") or 0),
        topology_key=str(_object(spec, "spread").get("topologyKey") or "topology.kubernetes.io/zone"),
        redundancy=str(_object(spec, "redundancy").get("mode") or ""),
        checkpoints=bool(spec.get("checkpoint")),
        state=str(status.get("state") or "Pending"),
        conditions=tuple(_condition(c) for c in status.get("conditions") or ()),
        epoch=int(status.get("epoch") or 0),
        pipelines_ready=int(pipelines.get("ready") or 0),
        workers_ready=int(workers.get("ready") or 0),
        workers_wanted=int(workers.get("desired") or 0),
        spot=int(workers.get("spot") or 0),
        on_demand=int(workers.get("onDemand") or 0),
        preemptions=int(status.get("preemptions") or 0),
        takeovers=int(status.get("takeovers") or 0),
        restarts=int(status.get("restarts") or 0),
        last_takeover=_takeover(_object(status, "lastTakeover")),
        step=int(training.get("step") or 0),
        steps=int(training.get("steps") or _object(spec, "training").get("steps") or 0),
        loss=training.get("loss"),
        samples_per_second=training.get("samplesPerSecond"),
        eta_seconds=training.get("etaSeconds"),
        reported=time_of(training.get("lastReportedTime")),
        checkpoint_step=_object(status, "checkpoint").get("lastStep"),
        cost=cost.get("total"),
        cost_per_hour=cost.get("perHour"),
        saved=cost.get("saved"),
        plan=_plan(status.get("plan")),
    )


def workers_of(
    job: RemoteJob, pods: Iterable[Json], nodes: Mapping[str, Json] | None = None
) -> tuple[RemoteWorker, ...]:
    """The job's, in the order of their numbers. nodes: by name, as far as they are known."""
    mine = (pod for pod in pods if _owner(pod) == job.uid)
    return tuple(sorted((_worker(job, pod, nodes or {}) for pod in mine), key=lambda w: (w.number, w.name)))


def events_of(job: RemoteJob, of_job: Iterable[Json], of_pods: Iterable[Json], pods: Iterable[str]) -> list[JobEvent]:
    """The job's events and those of its pods, also of pods that are gone, oldest first.

    An earlier job of the same name has another uid; of its pods' events nothing tells.
    """
    known = set(pods)
    mine = [e for e in of_job if _object(e, "involvedObject").get("uid") in (None, "", job.uid)]
    for event in of_pods:
        name = str(_object(event, "involvedObject").get("name"))
        if name in known or is_worker_of(job.name, name):
            mine.append(event)
    found = [_event(event) for event in mine]
    return sorted((h for h in found if job.created is None or h.at >= job.created), key=lambda h: (h.at, h.order))


def is_worker_of(job: str, pod: str) -> bool:
    """By its name: that is how the operator names a job's pods."""
    number = re.search(r"-w([0-9]{1,9})$", pod)
    return number is not None and names.worker_name(job, int(number[1])) == pod


def time_of(text: Any) -> datetime | None:
    """A time as the API writes it; None if it is absent or none."""
    try:
        found = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return found.replace(tzinfo=UTC) if found and found.tzinfo is None else found


def _object(body: Json, name: str) -> Json:
    found = body.get(name)
    return found if isinstance(found, Mapping) else {}


def _condition(body: Json) -> JobCondition:
    return JobCondition(
        kind=str(body.get("type")),
        holds=body.get("status") == "True",
        reason=str(body.get("reason") or ""),
        message=str(body.get("message") or ""),
        since=time_of(body.get("lastTransitionTime")),
    )


def _takeover(body: Json) -> LastTakeover | None:
    if not body:
        return None
    return LastTakeover(
        time=str(body.get("time")),
        victim=str(body.get("victim")),
        worker=str(body.get("worker")),
        pipeline=int(body.get("pipeline") or 0),
        stage=int(body.get("stage") or 0),
        seconds=float(body.get("pauseSeconds") or 0),
    )


def _plan(text: Any) -> tuple[tuple[str, ...], ...]:
    """The rows of owners; none if there is no plan, or it is of a form that only a newer version knows."""
    try:
        rows = json.loads(text)["pipelines"] if isinstance(text, str) else []
        return tuple(tuple(str(owner) for owner in row) for row in rows)
    except (ValueError, KeyError, TypeError):
        return ()


def _owner(pod: Json) -> str | None:
    owners: Sequence[Json] = _object(pod, "metadata").get("ownerReferences") or ()
    return next((o.get("uid") for o in owners if o.get("controller") and o.get("kind") == names.KIND), None)


def _worker(job: RemoteJob, pod: Json, nodes: Mapping[str, Json]) -> RemoteWorker:
    metadata, spec = _object(pod, "metadata"), _object(pod, "spec")
    labels, name = _object(metadata, "labels"), str(metadata.get("name"))
    cells, node = job.cells(name), str(spec.get("nodeName") or "")
    state, detail = _state(job, pod, name)
    grace = spec.get("terminationGracePeriodSeconds")
    number = str(labels.get(names.LABEL_WORKER_INDEX) or "")
    return RemoteWorker(
        name=name,
        uid=str(metadata.get("uid")),
        number=int(number) if number.isdecimal() else 0,
        state=state,
        detail=detail,
        cells=cells,
        node=node,
        zone=str(_object(_object(nodes.get(node) or {}, "metadata"), "labels").get(job.topology_key) or ""),
        capacity=str(labels.get(names.LABEL_CAPACITY_TYPE) or ""),
        pool=str(labels.get(names.LABEL_NODE_POOL) or ""),
        created=time_of(metadata.get("creationTimestamp")),
        grace_seconds=int(names.GRACE_SECONDS if grace is None else grace),
    )


def _state(job: RemoteJob, pod: Json, name: str) -> tuple[str, str]:
    status = _object(pod, "status")
    trainer = _container(status)
    if ended := _object(_object(trainer, "state"), "terminated"):
        code = int(ended.get("exitCode") or 0)
        return ("ended", "") if code == 0 else ("failed", f"{ended.get('reason') or 'Error'}, exit code {code}")
    if status.get("phase") in ("Succeeded", "Failed"):
        word = "ended" if status.get("phase") == "Succeeded" else "failed"
        return word, str(status.get("reason") or "")
    if _object(pod, "metadata").get("deletionTimestamp"):
        return "leaving", "its pod is being deleted"
    if _object(_object(trainer, "state"), "running"):
        return ("training" if job.cells(name) else "spare" if job.plan else "waiting"), ""
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return "pending", str(condition.get("message") or condition.get("reason") or "")
    if not _object(pod, "spec").get("nodeName"):
        return "pending", ""
    waiting = _object(_object(trainer, "state"), "waiting")
    told = [str(waiting[key]) for key in ("reason", "message") if waiting.get(key)]
    return "starting", ": ".join(told if told != ["ContainerCreating"] else [])


def _container(status: Json) -> Json:
    found: Sequence[Json] = status.get("containerStatuses") or ()
    return next((c for c in found if c.get("name") == names.TRAINER_CONTAINER), {})


def _event(event: Json) -> JobEvent:
    """Three generations of the API keep the time in different fields."""
    metadata, series = _object(event, "metadata"), _object(event, "series")
    times = (
        event.get("lastTimestamp"), series.get("lastObservedTime"), event.get("eventTime"),
        metadata.get("creationTimestamp"),
    )  # fmt: skip
    at = next((found for text in times if (found := time_of(text))), datetime.fromtimestamp(0, UTC))
    version = str(metadata.get("resourceVersion") or "")
    return JobEvent(
        uid=str(metadata.get("uid")),
        at=at,
        order=int(version) if version.isdecimal() else 0,
        about=str(_object(event, "involvedObject").get("name")),
        reason=str(event.get("reason") or ""),
        message=" ".join(str(event.get("message") or "").split()),
        warning=event.get("type") == "Warning",
        count=int(series.get("count") or event.get("count") or 1),
    )
