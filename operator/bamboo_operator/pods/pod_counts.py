"""How many pods a job has, as its share of the nodes is counted."""

from collections.abc import Mapping
from dataclasses import dataclass

from bamboo_core.coordinator.events import Status, WorkerState
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.planning.plan import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPodCounts:
    """A job's pods, without those of workers that are about to leave, and with one that is being made. by_pool: those
    that have a node; wanting: workers that have none. lacks_nodes: the scheduler has found none for one of them. pool:
    of the next pod.
    """

    pods: int
    by_pool: Mapping[str, int]
    wanting: int
    lacks_nodes: bool
    pool: NodePool | None


def leaving(status: Status) -> set[WorkerId]:
    """Workers that are about to leave."""
    return {worker for worker, state in status.workers if state is WorkerState.LEAVING}
