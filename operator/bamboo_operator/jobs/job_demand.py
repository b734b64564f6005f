"""What a job wants and has, for the bounds of its tenant and its place in line. Pure."""

import json
from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Any

from bamboo_core.coordinator.events import Status
from bamboo_core.coordinator.shell_view import WantedWorkers
from bamboo_core.job.node_placement import placement
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.job.spec import JobSpec, RedundancyMode, larger_by, wanted_workers
from bamboo_operator.manifests.template import asked_spec
from bamboo_operator.pods.pod_counts import JobPodCounts, leaving
from bamboo_operator.pods.pools import price_per_hour
from bamboo_operator.tenants.demand import JobDemand


def job_demand(
    name: str,
    made: float,
    spec: JobSpec,
    wanted: WantedWorkers,
    status: Status,
    pods: JobPodCounts,
    pools: Collection[NodePool],
    *,
    fewest: int,
    resumed: bool,
    queued: bool,
) -> JobDemand:
    """spec: as its user wants it, while that of `wanted` is within the job's bound. pools: at the prices of now.
    fewest: workers of the smallest grid that has room. resumed: it had a grid before this operator knew it.
    queued: Kueue says how many seats it has.
    """
    recovers = resumed and status.phase in ("Pending", "Recovering")
    own, placed = wanted_workers(wanted.spec), sum(pods.by_pool.values())
    most = wanted.number if wanted.number < own else wanted_workers(spec)
    cells = [(d, s, owner, held) for d, row in enumerate(status.grid) for s, (owner, held) in enumerate(row)]
    staying = {worker for worker, _ in status.workers} - leaving(status)
    protects = spec.redundancy.mode is not RedundancyMode.NONE
    bare = next((f"stage {s} of pipeline {d} has no second copy" for d, s, _, held in cells if not held), "")
    return JobDemand(
        name=name,
        namespace=spec.namespace,
        made=made,
        fewest=fewest,
        step=larger_by(spec),
        most=max(most, fewest),
        devices=spec.worker.devices,
        price=_price(tuple(pools), pods.by_pool, pods.pool),
        pods=pods.pods,
        placed=placed,
        wanting=pods.wanting,
        begun=wanted.begun or resumed,
        runs=recovers or (wanted.begun and status.phase in ("Running", "Recovering", "Saving")),
        broken=0 if status.phase == "Recovering" else len(cells) - len({owner for _, _, owner, _ in cells} & staying),
        harm=bare * protects,
        nodes=nodes_asked_for(spec, pods.pool),
        lacks_nodes=pods.lacks_nodes,
        queued=queued,
    )


def kept_demand(
    name: str, made: float, spec: JobSpec, pods: int, paid: Mapping[str, int], pools: Collection[NodePool]
) -> JobDemand | None:
    """The demand of a job that asks for nothing: it ends, is suspended, or is not looked after yet. What it still has
    is nobody else's. None if it has no pods. paid: those that have a node, by pool.
    """
    if not pods:
        return None
    return JobDemand(
        name=name,
        namespace=spec.namespace,
        made=made,
        fewest=pods,
        step=1,
        most=pods,
        devices=spec.worker.devices,
        price=_price(tuple(pools), paid, None),
        pods=pods,
        placed=sum(paid.values()),
        begun=True,
        runs=True,
    )


def _price(pools: tuple[NodePool, ...], by_pool: Mapping[str, int], pool: NodePool | None) -> Decimal:
    """What a worker costs for an hour: the mean of those that are there, else what the next one does."""
    if placed := sum(by_pool.values()):
        return (price_per_hour(pools, by_pool) or Decimal(0)) / placed
    found = next((one for one in pools if pool is not None and one.name == pool.name), None)
    return found.price_per_hour if found is not None and found.price_per_hour is not None else Decimal(0)


def nodes_asked_for(job: JobSpec, pool: NodePool | None) -> str:
    """What the nodes of its next worker have to be like: labels and devices. The same text means the same nodes."""
    where, template = placement(job, pool), asked_spec(job, pool)
    asked: dict[str, Any] = {
        "labels": {**(template.get("nodeSelector") or {}), **where.selector},
        "affinity": [*((template.get("affinity") or {}).get("nodeAffinity") or {}).items(), *where.expressions],
        "devices": sorted(one["key"] for one in where.tolerations if one.get("operator") == "Exists"),
    }
    return json.dumps({key: value for key, value in asked.items() if value}, sort_keys=True, default=str)
