"""Choice of node pools for workers' pods and of the worker to give back, and the workers' price. Pure; times in
seconds.
"""

from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal

from bamboo_core.job.placement_spec import NodePool
from bamboo_core.planning.plan import WorkerId

Pools = Sequence[NodePool]
Counts = Mapping[str, int]  # pods by the name of their pool


def choose_pool(pools: Pools, now: float, waiting_since: float | None, counts: Counts) -> NodePool | None:
    """Return the pool of the next pod; None if no pool has room or may take it yet, or if the job has no pools.

    This is the last pool with room whose `after_seconds` have passed, because then the pools before it do not deliver;
    else the first pool with room and no `after_seconds`. waiting_since: the earliest time in `missing_since`; None if
    no worker is missing.
    """
    waited = 0.0 if waiting_since is None else now - waiting_since
    chosen: NodePool | None = None
    for pool in pools:
        if not _has_room(pool, counts):
            continue
        if (pool.after_seconds and waited >= pool.after_seconds) or (chosen is None and not pool.after_seconds):
            chosen = pool
    return chosen


def are_full(pools: Pools, counts: Counts) -> bool:
    """Return whether every pool of the job is at its maxWorkers; False if the job has no pools."""
    return bool(pools) and not any(_has_room(pool, counts) for pool in pools)


def fallback_pool(pools: Pools, current: str, now: float, waiting_since: float, counts: Counts) -> NodePool | None:
    """Return the later pool for a pod that finds no node in its current one; None if it should go on waiting.

    counts: workers by pool, including the pod itself.
    """
    target = choose_pool(pools, now, waiting_since, counts)
    order = _order(pools)
    if target is None or order[target.name] <= order.get(current, -1):
        return None
    return target if target.after_seconds else None


def is_fallback(pools: Pools, name: str) -> bool:
    """Return whether the job uses this pool only when the pools before it deliver no nodes."""
    return any(pool.name == name and pool.after_seconds and index for index, pool in enumerate(pools))


def pool_to_probe(pools: Pools, counts: Counts, waiting: Counts) -> NodePool | None:
    """Return the pool in which to request a probe: one worker more than needed, so that a fallback pool's worker can be
    given back. None if no probe should be made.

    This is the first pool with room and no `after_seconds` before the last fallback pool that has workers. Only a
    request shows whether a pool has nodes again. waiting: pods without a node, by pool. While any of them waits in an
    earlier pool, there is no probe.
    """
    last = max((i for i, pool in enumerate(pools) if pool.after_seconds and counts.get(pool.name)), default=0)
    earlier = pools[:last]
    if any(waiting.get(pool.name) for pool in earlier):
        return None
    return next((pool for pool in earlier if not pool.after_seconds and _has_room(pool, counts)), None)


def worker_to_revert(
    pools: Pools,
    placed: Mapping[WorkerId, str],
    standby: Collection[WorkerId],
    leaving: Collection[WorkerId],
    keep: int,
) -> WorkerId | None:
    """Return the worker to give back from a pool with `after_seconds`, because a spare worker of an earlier pool can
    replace it; None if there is none, or while any worker is leaving.

    placed: the pool of each worker. standby: the ready spare workers, which own no stage. keep: how many spare workers
    must stay. Workers of the last pool go first, and among them spare workers.
    """
    order = _order(pools)
    ready = [order[placed[w]] for w in standby if placed.get(w) in order]
    if leaving or len(standby) <= keep or not ready:
        return None
    candidates = [
        worker
        for worker, pool in placed.items()
        if pool in order and pools[order[pool]].after_seconds and min(ready) < order[pool]
    ]
    return min(candidates, key=lambda w: (-order[placed[w]], w not in standby, w), default=None)


def surplus_worker(
    pools: Pools,
    placed: Mapping[WorkerId, str],
    waiting: Collection[WorkerId],
    standby: Collection[WorkerId],
    leaving: Collection[WorkerId],
    wanted: int,
) -> WorkerId | None:
    """Return the worker to give back if more than `wanted` workers exist, for example after an edit to fewer pipelines.

    None while any worker is leaving, or if no worker waits or is spare. placed: the pool of each worker that has a pod.
    waiting: the workers without a node, which go first. standby: the spare workers, which own no stage. Of several,
    the worker in the last pool goes.
    """
    if leaving or len(placed) <= wanted:
        return None
    order = _order(pools)
    idle = [w for w in waiting if w in placed] or [w for w in standby if w in placed]
    return max(idle, key=lambda w: (order.get(placed[w], -1), len(w), w), default=None)


def price_per_hour(pools: Pools, counts: Counts) -> Decimal | None:
    """Return the workers' cost per hour; None if no pool has a price. Pools without a price cost nothing."""
    prices = {pool.name: pool.price_per_hour for pool in pools if pool.price_per_hour is not None}
    if not prices:
        return None
    return sum((price * counts.get(name, 0) for name, price in prices.items()), Decimal(0))


def cost_of(per_hour: Decimal | None, seconds: float) -> Decimal:
    """Return the cost of `seconds` seconds at a price per hour; 0 without a price."""
    return (per_hour or Decimal(0)) * Decimal(round(seconds * 1000)) / 3_600_000


def _has_room(pool: NodePool, counts: Counts) -> bool:
    return pool.max_workers is None or counts.get(pool.name, 0) < pool.max_workers


def _order(pools: Pools) -> dict[str, int]:
    return {pool.name: index for index, pool in enumerate(pools)}
