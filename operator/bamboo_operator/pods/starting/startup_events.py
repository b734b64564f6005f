"""Problems that only a pod's events show: a volume or a network that its node cannot give it.

A missing Secret of an environment variable is in the pod's status. A missing Secret of a volume is not: the container
is `ContainerCreating` until it starts, and the kubelet reports the problem in events only.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bamboo_core.kube.api import KubeApi
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.kube.objects import parsed_time
from bamboo_operator.pods.starting.startup_problems import StartupProblem, is_unexplained

Json = Mapping[str, Any]

FIRST_SECONDS, LAST_SECONDS = 10.0, 60.0  # how long a pod has been awaited when its events are read, and read again
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
    """An event of a pod."""

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
    """Return what holds a pod back now according to its events; None if they report no problem, or a past one."""
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


class RecheckSchedule:
    """The times at which to read objects again: first after `first` seconds, then less and less often, up to every
    `last` seconds.
    """

    def __init__(self, first: float, last: float) -> None:
        self._first, self._last = first, last
        self._next: dict[str, tuple[float, float]] = {}  # time of the next read, and its distance from the last one

    def due(self, waited_for: Collection[str], now: float) -> list[str]:
        """Return the keys to read now, and forget the keys that are not waited for any more."""
        new = (now + self._first, self._first)
        self._next = {key: self._next.get(key, new) for key in waited_for}
        return [key for key, (at, _) in self._next.items() if at <= now]

    def answered(self, key: str, now: float) -> None:
        """Note that the object was read, and has not changed."""
        pause = min(2 * self._next[key][1], self._last)
        self._next[key] = (now + pause, pause)


class StartupEvents:
    """The events of pods whose status does not show why they do not start."""

    def __init__(self, namespace: str, api: KubeApi) -> None:
        self._namespace, self._api = namespace, api
        self._schedule = RecheckSchedule(FIRST_SECONDS, LAST_SECONDS)
        self._problems: dict[str, StartupProblem] = {}

    @property
    def problems(self) -> Mapping[str, StartupProblem]:
        """The problems by the pods' uids."""
        return self._problems

    async def read(self, pods: Mapping[WorkerId, Json], now: float) -> None:
        """Read the events of pods that are due. pods: all pods that may not have started. Raises RemoteError."""
        awaited = {pod["metadata"]["uid"] for pod in pods.values() if is_unexplained(pod)}
        self._problems = {uid: problem for uid, problem in self._problems.items() if uid in awaited}
        for uid in self._schedule.due(awaited, now)[:READ_AT_ONCE]:
            problem = event_problem(await self._api.pod_events(self._namespace, uid))
            self._schedule.answered(uid, now)
            self._problems.pop(uid, None)
            if problem is not None:
                self._problems[uid] = problem
