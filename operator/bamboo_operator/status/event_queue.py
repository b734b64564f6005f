"""The Kubernetes events of a job that are not posted yet."""

from collections import deque

from bamboo.coordinator.events import Emit
from bamboo.kube.errors import ApiError
from bamboo.page.history import JobHistory
from bamboo_operator.kube.client import ApiClient
from bamboo_operator.kube.objects import JobIdentity, utc_now
from bamboo_operator.manifests.event import event

MOST_UNPOSTED = 1000
EVENTS_AT_ONCE = 20


class EventQueue(deque[Emit]):
    """record: the job's page, which shows an event at once, whatever the API server does; None if there is none yet."""

    def __init__(self, record: JobHistory | None = None) -> None:
        super().__init__((), MOST_UNPOSTED)
        self._record = record

    def append(self, emit: Emit) -> None:
        if self._record is not None:
            self._record.add_event(emit)
        super().append(emit)


async def post_events(api: ApiClient, job: JobIdentity, queue: EventQueue) -> None:
    """The oldest ones; those that are posted, or never will be, leave the queue. Raises what is in API_ERRORS."""
    for _ in range(min(EVENTS_AT_ONCE, len(queue))):
        emit = queue[0]
        try:
            await api.create_event(event(job, emit, utc_now()))
        except ApiError as error:
            if not may_be_posted_later(error):
                _drop(queue, emit)
            raise
        _drop(queue, emit)


def may_be_posted_later(error: ApiError) -> bool:
    """Is the event refused only for now? An API server that has just started forbids everything for a moment."""
    return error.status in (403, 429) or error.status >= 500 or error.reason == "NotJson"


def _drop(queue: EventQueue, emit: Emit) -> None:
    """A full queue may have lost its oldest event already, when a new one came meanwhile."""
    if queue and queue[0] is emit:
        queue.popleft()
