"""The queue of a job's Kubernetes events, and the function that posts them."""

from collections import deque
from datetime import datetime

from bamboo_core.coordinator.events import Emit
from bamboo_core.kube.api import KubeApi, Object
from bamboo_core.kube.errors import ApiError
from bamboo_core.names import API_VERSION, KIND
from bamboo_core.page.timeline import JobTimeline
from bamboo_operator.kube.objects import JobIdentity, api_time, utc_now

COMPONENT = "bamboo-operator"


def event(job: JobIdentity, emit: Emit, now: datetime) -> Object:
    namespace, name = job.key
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{name[:200]}.", "namespace": namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": namespace,
            "name": name,
            "uid": job.uid,
        },
        "reason": emit.reason[:128],
        "message": emit.message[:1000],
        "type": "Warning" if emit.warning else "Normal",
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": COMPONENT,
        "firstTimestamp": api_time(now),
        "lastTimestamp": api_time(now),
        "count": 1,
    }


MOST_UNPOSTED = 1000
EVENTS_AT_ONCE = 20
MOST_COUNTED = 256  # posted events whose repetitions are counted


class EventQueue(deque[Emit]):
    """The queue of a job's Kubernetes events to post, oldest first. When full, it drops its oldest event.

    record: the timeline of the job's page, which shows events at once; None while no coordinator runs. posted: the name
    and count of the Kubernetes event for each of the last MOST_COUNTED distinct events.
    """

    def __init__(self, record: JobTimeline | None = None) -> None:
        super().__init__((), MOST_UNPOSTED)
        self._record = record
        self.posted: dict[tuple[str, str, bool], tuple[str, int]] = {}

    def append(self, emit: Emit) -> None:
        if self._record is not None:
            self._record.add_event(emit)
        super().append(emit)


async def post_events(api: KubeApi, job: JobIdentity, queue: EventQueue) -> None:
    """Post the oldest events, at most EVENTS_AT_ONCE. Raises RemoteError at the first failure, after dropping the event
    if it can never be posted.
    """
    for _ in range(min(EVENTS_AT_ONCE, len(queue))):
        emit = queue[0]
        try:
            await _post(api, job, queue, emit, utc_now())
        except ApiError as error:
            if not may_be_posted_later(error):
                _drop(queue, emit)
            raise
        _drop(queue, emit)


async def _post(api: KubeApi, job: JobIdentity, queue: EventQueue, emit: Emit, now: datetime) -> None:
    """Post an event, or increment the count of its earlier Kubernetes event, as Kubernetes' own controllers do."""
    key = (emit.reason, emit.message, emit.warning)
    name, count = queue.posted.pop(key, ("", 0))
    if not (name and await api.count_event(job.key[0], name, count + 1, api_time(now))):
        made = await api.create_event(event(job, emit, now))
        name, count = str((made.get("metadata") or {}).get("name") or ""), 0
    queue.posted[key] = name, count + 1
    if len(queue.posted) > MOST_COUNTED:
        del queue.posted[next(iter(queue.posted))]


def may_be_posted_later(error: ApiError) -> bool:
    """Return whether a refused event may be accepted later. An API server that has just started answers 403."""
    return error.status in (403, 429) or error.status >= 500 or error.reason == "NotJson"


def _drop(queue: EventQueue, emit: Emit) -> None:
    """Remove an event from the front of the queue, unless the full queue has dropped it for a newer event."""
    if queue and queue[0] is emit:
        queue.popleft()
