"""Requests of a job to its Kueue queue, and the return of its quota. No I/O.

Kueue admits each worker's pod separately (docs/design/operator.md): its webhook puts a scheduling gate on a new pod,
and its manager removes the gate once the queue has quota for that pod. To preempt a worker it deletes the worker's pod.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Final

from bamboo_core.job.spec import JobSpec, QueueSpec
from bamboo_core.names import LABEL_QUEUE, LABEL_QUEUE_MANAGED, LABEL_QUEUE_PRIORITY
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.kube.objects import JobKey
from bamboo_operator.pods.starting import StartupProblem, waits_for_quota
from bamboo_operator.signals.signals import lives

Json = Mapping[str, Any]
Pods = Mapping[WorkerId, Json]

WAITING = "WaitingForQuota"
PATIENCE_SECONDS: Final = 60.0  # for which a job may hold quota that is too small for it to begin
FIRST_PAUSE, LAST_PAUSE = 30.0, 480.0  # seconds without pods, after the job has given its quota back
JITTER: Final = 0.5  # largest extension of patience and pauses, as a share, so that two jobs do not return together
SETTLE_SECONDS: Final = 10.0  # after a job has given quota back, which may suffice for the next one


def admitted(pods: Pods) -> int:
    return sum(not waits_for_quota(pod) for pod in pods.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRequest:
    """A job's next request to its queue.

    room: how many more pods the job may create. priority: the priority class of the next pod; None keeps the class of
    its template. outranked: pods that wait in the growth class although the job cannot train without them. The operator
    deletes them and creates others in the first class.
    """

    room: int
    priority: str | None
    outranked: tuple[WorkerId, ...] = ()


def next_request(queue: QueueSpec, pods: Pods, fewest: int, pipeline: int) -> QueueRequest:
    """Decide how many pods a job may add to its queue, and with which priority class.

    The job grows by one pipeline at a time, and only once the workers that it needs are admitted, because a pod that
    waits in a queue comes before all later requests of other jobs.

    pods: the pods of workers that stay. fewest: the number of workers with which the job can train. pipeline: the
    number of workers in one pipeline.
    """
    first, later = queue.priority_class, queue.growth_priority_class or queue.priority_class
    growth = [name for name, pod in pods.items() if first != later and _label(pod, LABEL_QUEUE_PRIORITY) == later]
    needed = fewest - (len(pods) - len(growth))
    if needed > 0:
        waiting = sorted(name for name in growth if waits_for_quota(pods[name]))
        return QueueRequest(room=needed, priority=first, outranked=tuple(waiting[:needed]))
    held = admitted(pods)
    return QueueRequest(room=max(0, held + pipeline - len(pods)) if held >= fewest else 0, priority=later)


def _label(pod: Json, key: str) -> str | None:
    found: str | None = (pod["metadata"].get("labels") or {}).get(key)
    return found


def with_priority_class(pod: dict[str, Any], name: str | None) -> dict[str, Any]:
    """Return the pod with the WorkloadPriorityClass `name` as its label; None leaves the pod as it is. The pod's
    revision stays the same.
    """
    if name is None:
        return pod
    metadata = pod["metadata"]
    return {**pod, "metadata": {**metadata, "labels": {**metadata["labels"], LABEL_QUEUE_PRIORITY: name}}}


def waiting_for_quota(pods: Pods, unrequested: int) -> Iterator[StartupProblem]:
    """Yield one problem if pods wait for Kueue's quota. unrequested: number of workers that the job requests later."""
    queues = [_label(pod, LABEL_QUEUE) or "" for pod in pods.values() if lives(pod) and waits_for_quota(pod)]
    if queues:
        later = f"; {unrequested} more are requested once these are admitted" if unrequested else ""
        names = ", ".join(sorted(set(queues)))
        yield StartupProblem(WAITING, f"{len(queues)} worker(s) wait for quota in Kueue's queue {names}{later}")


def unmanaged(job: JobSpec, pods: Iterable[Json]) -> str:
    """Return a message that the job's queue has no effect, since Kueue has not marked all pods; "" otherwise."""
    if job.queue is None or all(_label(pod, LABEL_QUEUE_MANAGED) for pod in pods):
        return ""
    return (
        f"spec.queue: Kueue does not manage pods of namespace {job.namespace} (no label {LABEL_QUEUE_MANAGED} on"
        " workers' pods), so these workers need no quota"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldQuota:
    """A record of quota that a job holds in vain: too little for the job to begin, while other jobs may wait for it.

    since: when that began (time.monotonic()); None if the job does not hold quota in vain. times: how often the job has
    given quota back since it last trained. until: when it requests quota again. uid: the job's UID, which makes its
    jitter differ from that of other jobs. message: why the job gave its quota back.
    """

    uid: str
    since: float | None = None
    times: int = 0
    until: float = -math.inf
    message: str = ""

    def look(self, *, in_vain: bool, trains: bool, now: float) -> "HeldQuota":
        """Return the record, updated with the job's present state. trains: the job trains, which resets the record.

        in_vain: the queue has admitted too few pods, and pods of the job wait at Kueue's gate. Waiting for nodes does
        not count.
        """
        if trains:
            return HeldQuota(uid=self.uid)
        since = (now if self.since is None else self.since) if in_vain else None
        return self if since == self.since else replace(self, since=since)

    @property
    def due(self) -> float:
        """The monotonic time when the job gives its quota back, unless a younger job does so first; inf if never."""
        return math.inf if self.since is None else self.since + self._jittered(PATIENCE_SECONDS)

    def let_go(self, now: float, held: int, fewest: int) -> "HeldQuota":
        """Return the record after the job has given its quota back.

        held: number of workers that the queue has admitted. fewest: number with which the job can begin.
        """
        waited = now - (now if self.since is None else self.since)
        pause = self._jittered(min(LAST_PAUSE, FIRST_PAUSE * 2.0 ** min(self.times, 10)))
        message = (
            f"the queue admitted {held} of the {fewest} workers with which the job can begin, within {waited:.0f} s;"
            f" the job lets them go, and asks again after {pause:.0f} s"
        )
        return HeldQuota(uid=self.uid, times=self.times + 1, until=now + pause, message=message)

    def problem(self, now: float) -> Iterator[StartupProblem]:
        """Yield why the job has no pods, if it pauses after giving its quota back."""
        if now < self.until:
            yield StartupProblem("QuotaGivenBack", self.message)

    def _jittered(self, seconds: float) -> float:
        drawn = sha256(f"{self.uid} {self.times}".encode()).digest()[0] / 256
        return seconds * (1 + JITTER * drawn)


class QuotaHolders:
    """The jobs of an operator that hold quota in vain. They give it back one at a time, the youngest first, so that
    other jobs may begin.
    """

    def __init__(self) -> None:
        self._made: dict[JobKey, tuple[float, str]] = {}  # when each was created, and its uid
        self.settled = -math.inf  # when another job may give its quota back (time.monotonic())

    def note(self, job: JobKey, made: tuple[float, str]) -> None:
        self._made[job] = made

    def forget(self, job: JobKey) -> None:
        self._made.pop(job, None)

    def lets_go(self, job: JobKey, now: float) -> bool:
        """Return whether it is the job's turn to give its quota back. If it is, forget the job, and make other jobs
        wait SETTLE_SECONDS.
        """
        if now < self.settled or job != max(self._made, key=lambda key: self._made[key], default=None):
            return False
        self.forget(job)
        self.settled = now + SETTLE_SECONDS
        return True
