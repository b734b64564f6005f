"""What a job's user is told, on its way to the API server and to the job's page."""

from collections import deque

from bamboo.coordinator.events import Emit
from bamboo.page.history import JobHistory

MOST_UNPOSTED = 1000


class Story(deque[Emit]):
    """What is still to be posted as events. The page is told at once, whatever the API server does."""

    def __init__(self, record: JobHistory) -> None:
        super().__init__((), MOST_UNPOSTED)
        self._record = record

    def append(self, emit: Emit) -> None:
        self._record.add_event(emit)
        super().append(emit)
