"""What a job's workers cost: counted while they are watched, and made up for the time in which no operator did.

The totals are in the job's status together with the time until which they are counted. Counters in metrics are what is
written there, so that they go on from operator to operator and never fall: Prometheus takes a fall for a beginning at
0, and would count all that came before once more.
"""

import time
from collections import Counter
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from bamboo_core.coordinator.events import PricesTold
from bamboo_core.job.placement_spec import NodePool, next_prices
from bamboo_core.job.spec import JobSpec
from bamboo_core.names import TRAINER_CONTAINER
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.jobs.meter import JobMeter
from bamboo_operator.kube.objects import parsed_time, utc_now
from bamboo_operator.manifests.worker_pod import worker_pool
from bamboo_operator.pods.job_pods import JobPods
from bamboo_operator.pods.pools import cost_of, price_per_hour
from bamboo_operator.signals.signals import is_deleted, worker_exit

Json = Mapping[str, Any]


class CostCounter:
    """One job's cost, from when an operator first sees the job. meter: takes worker time.

    paid: workers that have a node, by their pool; None as long as that is not known. cost: since this operator has
    known the job. counted_until: None if it never was.

    Time is counted at the prices that were in force when it began; an edit of a price counts from then on.
    """

    def __init__(self, pods: JobPods, meter: JobMeter, counted_until: datetime | None) -> None:
        self._pods, self._meter, self.counted_until = pods, meter, counted_until
        self._counted = 0.0  # when it was counted last (time.monotonic())
        self._pools: tuple[NodePool, ...] = ()  # with their prices, since then
        self.paid: Mapping[str, int] | None = None
        self.cost = Decimal(0)

    def count(self, pools: tuple[NodePool, ...], *, joined: Collection[WorkerId]) -> None:
        """Count until now: since the last count there were as many workers as then. pools: their prices from now on.

        joined: all workers that have a node for certain.
        """
        now, until = time.monotonic(), utc_now()
        if self.paid is None:
            self._pools = pools
            self._count_unwatched(until)
        else:
            self._add(self.paid, now - self._counted)
        self._pools = pools
        before, self.paid, self._counted = self.paid, dict(self._pods.paid_for(joined)), now
        if before or self.paid:  # else the status of a job that waits would change all the time
            self.counted_until = until

    def prices(self, spec: JobSpec | None) -> PricesTold:
        """Return the hourly price of each worker that has one, with a node or without, and the prices of more workers,
        by the pools' room.
        """
        if spec is None:
            return PricesTold({})
        known = {pool.name: float(pool.price_per_hour) for pool in spec.node_pools if pool.price_per_hour is not None}
        placed = {name: worker_pool(pod) or "" for name, pod in self._pods.living().items()}
        return PricesTold(
            {name: known[pool] for name, pool in placed.items() if pool in known},
            next_prices(spec.node_pools, Counter(placed.values())),
        )

    def _count_unwatched(self, now: datetime) -> None:
        """Count what the living pods have cost since another operator last counted."""
        since = self.counted_until
        for pod in self._pods.all().values() if since is not None else ():
            self._add({worker_pool(pod) or "": 1}, paid_seconds(pod, since, now))

    def _add(self, paid: Mapping[str, int], seconds: float) -> None:
        """Add what so many workers in each pool cost in that time; add their time to metrics."""
        self._meter.paid += sum(paid.values()) * seconds
        self.cost += cost_of(price_per_hour(self._pools, paid), seconds)


def paid_seconds(pod: Json, since: datetime | None, now: datetime) -> float:
    """For how long of that time the worker had its node; 0 if that is not known."""
    began, ended = _placed_at(pod), _ended_at(pod, now)
    if since is None or began is None or ended is None:
        return 0.0
    return max(0.0, (min(ended, now) - max(began, since)).total_seconds())


def _placed_at(pod: Json) -> datetime | None:
    """When it got its node; None if it has none."""
    if not (pod.get("spec") or {}).get("nodeName"):
        return None
    status = pod.get("status") or {}
    scheduled = (c for c in status.get("conditions") or () if c.get("type") == "PodScheduled" and c["status"] == "True")
    told = next((c.get("lastTransitionTime") for c in scheduled), None) or status.get("startTime")
    return parsed_time(told or pod["metadata"].get("creationTimestamp"))


def _ended_at(pod: Json, now: datetime) -> datetime | None:
    """When it no longer counts as living, now if it does; None if it has ended at a time that is not told."""
    if worker_exit(pod) is not None:
        for container in (pod.get("status") or {}).get("containerStatuses") or ():
            ended = (container.get("state") or {}).get("terminated") or {}
            if container.get("name") == TRAINER_CONTAINER and ended:
                return parsed_time(ended.get("finishedAt"))
        return None
    if not is_deleted(pod):
        return now
    metadata = pod["metadata"]
    end = parsed_time(metadata["deletionTimestamp"])
    return end - timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0) if end else None
