"""Startup problems of workers that have not joined yet, and the backoff before the operator requests new workers.

A pod's status shows why it does not start: no node, no image, a missing Secret of an environment variable, or a
scheduling gate of its template or of Kueue (`queueing`), which keeps the scheduler from placing it. A missing Secret of
a volume is not in the status: the container is `ContainerCreating` until it starts, and only the kubelet's events
report the problem. So the operator reads the events of a pod whose status gives no reason.

A worker whose image or template is wrong, or whose node refuses it, ends before it has joined, and its successor would
end the same way: the operator waits before it requests workers again.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from types import MappingProxyType
from typing import Any

from bamboo_core.job.spec import JobSpec
from bamboo_core.kube.api import KubeApi
from bamboo_core.names import QUEUE_GATE, TRAINER_CONTAINER
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.kube.objects import parsed_time
from bamboo_operator.manifests.template import read_templates
from bamboo_operator.signals.cloud_marks import DISRUPTIONS
from bamboo_operator.signals.signals import is_deleted, lives, worker_exit

Json = Mapping[str, Any]


def gates_of(pod: Json) -> tuple[str, ...]:
    """Return the names of the scheduling gates that hold the pod back; () if the scheduler may place it."""
    return tuple(str(gate.get("name")) for gate in (pod.get("spec") or {}).get("schedulingGates") or ())


def waits_for_quota(pod: Json) -> bool:
    """Return whether Kueue holds the pod back until there is quota for it."""
    return QUEUE_GATE in gates_of(pod)


class GateReleases:
    """The times at which pods without a node lost their scheduling gates.

    A pod does not show whether it ever had gates. So a pod that may have had gates, but has none when the operator
    first sees it, counts as released at that moment.
    """

    def __init__(self, job: JobSpec) -> None:
        templates = read_templates(job, job.node_pools)
        of_template = any(one.template["spec"].get("schedulingGates") for one in templates)
        self._expected = of_template or job.queue is not None
        self._seen, self._held, self._at = set[WorkerId](), set[WorkerId](), dict[WorkerId, float]()

    def observe(self, waiting: Mapping[WorkerId, Json], now: float) -> None:
        """Note which pods have lost their gates. waiting: all pods without a node. now: time.monotonic()."""
        held = {name for name, pod in waiting.items() if gates_of(pod)}
        new = waiting.keys() - self._seen
        released = (self._held | (new if self._expected else set())) - held
        at = self._at | dict.fromkeys(released, now)
        self._at = {name: at[name] for name in at.keys() & waiting.keys()}
        self._seen, self._held = set(waiting), held

    def at(self, worker: WorkerId) -> float | None:
        """Return when the worker's gates went away; None if it never had any, still has some, or has a node."""
        return self._at.get(worker)


FIRST_BACKOFF, LAST_BACKOFF = 10.0, 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartBackoff:
    """The growing pause before the operator requests workers again, after workers that ended before they joined."""

    rounds: int = 0  # consecutive rounds of workers that ended before they joined
    made: int = 0  # workers made so far when the newest round ended
    ended: float = 0.0  # when that was (monotonic seconds)
    detail: str = ""  # how the last one ended

    def after(self, number: int, made: int, now: float, detail: str) -> "StartBackoff":
        """Return the backoff after one more worker that ended before it joined. number: the worker's number; made: how
        many workers were made so far.

        A worker that was created before the newest round ended belongs to that round.
        """
        if self.rounds and number < self.made:
            return replace(self, detail=detail)
        return StartBackoff(rounds=self.rounds + 1, made=made, ended=now, detail=detail)

    @property
    def pause(self) -> float:
        """The seconds from the end of the newest round to the next one; 0 after the first round, which is forgiven."""
        return 0.0 if self.rounds < 2 else min(LAST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(self.rounds - 2, 30))

    def holds(self, now: float) -> bool:
        """Return whether the operator must not request workers yet."""
        return now < self.ended + self.pause


def failed_start(pod: Mapping[str, Any]) -> str | None:
    """Return how a pod's worker ended by itself, with any exit code, or why the node refused the pod. Return None if
    the worker has not ended, was disrupted or is being deleted.
    """
    end, reason = worker_exit(pod), (pod.get("status") or {}).get("reason")
    return None if end is None or is_deleted(pod) or reason in DISRUPTIONS else end[1]


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
    """A reason why pods do not start, with a sentence about them."""

    reason: str  # CamelCase
    message: str  # a sentence


NO_EVENTS: Mapping[str, StartupProblem] = MappingProxyType({})


def missing_pods(
    count: int, backoff: StartBackoff | None, *, refused: str, pools_full: bool
) -> Iterator[StartupProblem]:
    """Yield a problem for each reason why `count` workers have no pod: a backoff, a refusal, full pools. backoff: None
    if no backoff holds. refused: why the API server refused the newest pod; "" if it did not.
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

    The condition PodReadyToStartContainers (from Kubernetes 1.29 on) shows that a pod has its volumes and its network.
    All later problems, such as a failed image pull, are in the pod's status.
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
    """Return the problems that keep workers from starting: one for each reason, with the first worker's message. pods:
    by worker.

    events: problems by the pods' uids, for pods whose status does not show any. The problem of pods that only wait for
    a scheduling gate, other than Kueue's, comes last, because the other problems need a user's help.
    """
    found = [(name, problem) for name in sorted(pods) for problem in _of(pods[name], events)]
    count = Counter(problem.reason for _, problem in found)
    first = {problem.reason: (name, problem.message) for name, problem in reversed(found)}
    each = tuple(StartupProblem(reason, _sentence(reason, count[reason], *first[reason])) for reason in sorted(first))
    return (*each, *_held_back(pods))


def _sentence(reason: str, count: int, name: str, message: str) -> str:
    """Return a sentence on pods that do not start. name: the first worker's, by which a user finds its pod."""
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
    """Return the pod's condition PodScheduled if its reason is Unschedulable; None otherwise."""
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
    """Return the waiting state of a container; None if it does not wait."""
    found: Json | None = (container.get("state") or {}).get("waiting")
    return found


def _why(reason: str, message: Any, image: Any) -> str:
    """Return why a container waits, in the kubelet's words; for an image, the error of the last attempt to pull it.

    Between attempts the kubelet prefixes that error with its back-off; kubelets before 1.32 leave out the error.
    """
    last_error = _BACK_OFF.sub("", str(message or ""), count=1) if reason == IMAGE else ""
    return last_error or f"{reason}: {message or image}"


FIRST_SECONDS = 10.0  # from the first look at an unexplained pod until its events are read
AGAIN_SECONDS = 60.0  # between two reads of the events of one pod
READ_AT_ONCE = 10
REPEATED_SECONDS = 150.0  # within which the kubelet tries a volume again and repeats its event
LONGEST_MESSAGE = 500
_CAUSES = {  # reasons of events -> the reason that is reported
    "FailedMount": "FailedMount",
    "FailedMapVolume": "FailedMount",
    "FailedAttachVolume": "FailedAttachVolume",
    "FailedCreatePodSandBox": "FailedCreatePodSandBox",
    "NetworkNotReady": "NetworkNotReady",
}
_PROGRESS = ("Pulling", "Pulled", "Created", "Started")  # events once volumes and network are ready
_SUMMARY = "Unable to attach or mount volumes"  # names volumes, and no cause
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class PodEvent:
    """A Kubernetes event about a pod."""

    reason: str
    message: str
    at: datetime  # when it happened last, by the reporter's clock

    @classmethod
    def read(cls, event: Json) -> "PodEvent":
        series, metadata = event.get("series") or {}, event.get("metadata") or {}
        last, began = series.get("lastObservedTime") or event.get("lastTimestamp"), metadata.get("creationTimestamp")
        at = parsed_time(last or event.get("eventTime") or began) or _LONG_AGO
        return cls(str(event.get("reason")), str(event.get("message") or ""), at)


def event_problem(events: Iterable[Json]) -> StartupProblem | None:
    """Return the current problem of a pod according to its events; None if they report none, or one that has passed."""
    found = [PodEvent.read(event) for event in events]
    failures = [event for event in found if event.reason in _CAUSES]
    if not failures:
        return None
    newest = max(event.at for event in failures)
    if any(event.reason in _PROGRESS and event.at >= newest for event in found):
        return None
    current = [event for event in failures if (newest - event.at).total_seconds() <= REPEATED_SECONDS]
    causes = [event for event in current if not event.message.startswith(_SUMMARY)] or current
    reason = _CAUSES[max(causes, key=lambda event: (event.at, event.reason)).reason]
    messages = sorted({event.message for event in causes if _CAUSES[event.reason] == reason})
    return StartupProblem(reason, f"{reason}: {'; '.join(messages)}"[:LONGEST_MESSAGE])


class StartupEvents:
    """The startup problems in events, for pods whose status does not show why they do not start."""

    def __init__(self, namespace: str, api: KubeApi) -> None:
        self._namespace, self._api = namespace, api
        self._due: dict[str, float] = {}  # when the events of a pod are read next, by its uid
        self.problems: dict[str, StartupProblem] = {}  # by the pods' uids

    async def read(self, pods: Mapping[WorkerId, Json], now: float) -> None:
        """Read the events of at most READ_AT_ONCE pods whose next read is due, and update `problems`. pods: all pods
        that may not have started. Raises RemoteError.
        """
        awaited = {pod["metadata"]["uid"] for pod in pods.values() if is_unexplained(pod)}
        self.problems = {uid: problem for uid, problem in self.problems.items() if uid in awaited}
        self._due = {uid: self._due.get(uid, now + FIRST_SECONDS) for uid in awaited}
        for uid in [uid for uid, at in self._due.items() if at <= now][:READ_AT_ONCE]:
            problem = event_problem(await self._api.pod_events(self._namespace, uid))
            self._due[uid] = now + AGAIN_SECONDS
            self.problems.pop(uid, None)
            if problem is not None:
                self.problems[uid] = problem


REPORT_SECONDS, REPLACE_SECONDS = 60.0, 600.0


def seconds_unjoined(
    pods: Mapping[WorkerId, Mapping[str, Any]], joined: Collection[WorkerId], since: datetime, now: datetime
) -> dict[WorkerId, float]:
    """Return, for each worker that runs and has not joined, the seconds that its container has run.

    since: when the operator began to listen, or its coordinator had recovered; earlier seconds do not count.
    """
    began = {name: _running_since(pod) for name, pod in pods.items() if name not in joined}
    return {name: (now - max(at, since)).total_seconds() for name, at in began.items() if at is not None}


def join_problem(unjoined: Mapping[WorkerId, float], url: str) -> StartupProblem | None:
    """Return the problem of workers that have run for REPORT_SECONDS and not connected; None if there are none. url:
    the address that workers connect to.
    """
    late = sorted(name for name, seconds in unjoined.items() if seconds >= REPORT_SECONDS)
    if not late:
        return None
    return StartupProblem(
        "WorkerSilent",
        f"{len(late)} worker(s) are running but have not connected to {url}: see the log of {late[0]}, and check"
        " that the network lets it through",
    )


def _running_since(pod: Mapping[str, Any]) -> datetime | None:
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        started = ((status.get("state") or {}).get("running") or {}).get("startedAt")
        if status.get("name") == TRAINER_CONTAINER and isinstance(started, str):
            return datetime.fromisoformat(started)
    return None
