"""The cost of a job's workers: counted while an operator watches them, and estimated for the time without one.

The job's status holds the total and the time up to which it is counted. The counter in metrics shows the written
total, so that it continues from operator to operator and never falls: Prometheus takes a fall for a restart at 0 and
would count all earlier costs again.
"""

import time
from collections import Counter
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from bamboo_core.coordinator.events import PricesReported
from bamboo_core.job.placement_spec import NodePool, next_prices
from bamboo_core.job.spec import JobSpec
from bamboo_core.names import TRAINER_CONTAINER
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.jobs.meter import JobMeter
from bamboo_operator.kube.objects import parsed_time, utc_now
from bamboo_operator.manifests.worker_pod import worker_pool
from bamboo_operator.pods.pools import cost_of, price_per_hour
from bamboo_operator.pods.view import JobPods
from bamboo_operator.signals.signals import is_deleted, worker_exit

Json = Mapping[str, Any]


class CostCounter:
    """A counter of the cost of one job's workers since an earlier counter's last count. meter: receives worker-seconds.

    paid: number of workers with a node, by pool; None before the first count. counted_until: the time up to which cost
    is counted; None if never. An edited price applies from the next count on.
    """

    def __init__(self, pods: JobPods, meter: JobMeter, counted_until: datetime | None) -> None:
        self._pods, self._meter, self.counted_until = pods, meter, counted_until
        self._counted = 0.0  # time.monotonic() of the last count
        self._pools: tuple[NodePool, ...] = ()  # with their prices, since then
        self.paid: Mapping[str, int] | None = None
        self.cost = Decimal(0)

    def count(self, pools: tuple[NodePool, ...], *, joined: Collection[WorkerId]) -> None:
        """Add the cost since the last count, for the workers and prices noted then, and note the present ones. The
        first call counts existing pods from `counted_until` on.
        pools: node pools with their present prices. joined: workers that certainly have a node.
        """
        now, until = time.monotonic(), utc_now()
        if self.paid is None:
            self._pools = pools
            self._count_unwatched(until)
        else:
            self._add(self.paid, now - self._counted)
        self._pools = pools
        before, self.paid, self._counted = self.paid, dict(self._pods.paid_for(joined)), now
        if before or self.paid:  # else the status of a waiting job would change all the time
            self.counted_until = until

    def prices(self, spec: JobSpec | None) -> PricesReported:
        """Return the hourly prices of the living workers, and of further workers from the pools that have room. Pools
        without a price are left out. spec: None gives no prices.
        """
        if spec is None:
            return PricesReported({})
        known = {pool.name: float(pool.price_per_hour) for pool in spec.node_pools if pool.price_per_hour is not None}
        placed = {name: worker_pool(pod) or "" for name, pod in self._pods.living().items()}
        return PricesReported(
            {name: known[pool] for name, pool in placed.items() if pool in known},
            next_prices(spec.node_pools, Counter(placed.values())),
        )

    def _count_unwatched(self, now: datetime) -> None:
        """Add what the existing pods have cost since the last count of an earlier counter, if there was one."""
        since = self.counted_until
        for pod in self._pods.all().values() if since is not None else ():
            self._add({worker_pool(pod) or "": 1}, paid_seconds(pod, since, now))

    def _add(self, paid: Mapping[str, int], seconds: float) -> None:
        """Add `seconds` of the paid workers to the cost and to the metric of paid time. paid: workers by pool."""
        self._meter.paid += sum(paid.values()) * seconds
        self.cost += cost_of(price_per_hour(self._pools, paid), seconds)


def paid_seconds(pod: Json, since: datetime | None, now: datetime) -> float:
    """Return the seconds from `since` to `now` in which a worker's pod had a node and had not ended; 0 if unknown."""
    began, ended = _placed_at(pod), _ended_at(pod, now)
    if since is None or began is None or ended is None:
        return 0.0
    return max(0.0, (min(ended, now) - max(began, since)).total_seconds())


def _placed_at(pod: Json) -> datetime | None:
    """Return when a pod got its node; None without one."""
    if not (pod.get("spec") or {}).get("nodeName"):
        return None
    status = pod.get("status") or {}
    scheduled = (c for c in status.get("conditions") or () if c.get("type") == "PodScheduled" and c["status"] == "True")
    placed = next((c.get("lastTransitionTime") for c in scheduled), None) or status.get("startTime")
    return parsed_time(placed or pod["metadata"].get("creationTimestamp"))


def _ended_at(pod: Json, now: datetime) -> datetime | None:
    """Return when a pod's worker exited or its deletion was requested, or `now` if it lives; None if that time is
    unknown.
    """
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
