"""What decides how many workers a job has, as the pod controller sees it."""

from collections.abc import Collection
from typing import Protocol

from bamboo_core.coordinator.events import Event, Status
from bamboo_core.coordinator.wanted_workers import WantedWorkers
from bamboo_core.planning.plan import WorkerId


class PodRequests(Protocol):
    """What a job's coordinator wants of its pods, and is told of them."""

    @property
    def wanted(self) -> WantedWorkers: ...

    @property
    def joined(self) -> Collection[WorkerId]: ...

    @property
    def finished(self) -> bool:
        """Has the job ended?"""

    def status(self) -> Status: ...

    def fewest_to_begin(self) -> int:
        """Workers of the smallest grid that has room, as far as that is known."""

    def tell(self, event: Event) -> None:
        """Let the coordinator take that event in, after those that wait."""

    def handle(self, event: Event) -> None:
        """Let it take that event in at once."""

    def removal_forced(self, worker: WorkerId) -> None:
        """Notes that a pod is about to be deleted, because its worker did not exit."""
