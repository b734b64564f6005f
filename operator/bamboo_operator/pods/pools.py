"""Which node pool a worker's pod goes to, which worker is given back, and what the workers cost. Times are seconds."""

from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal

from bamboo_core.job.placement_spec import NodePool
from bamboo_core.planning.plan import WorkerId

Pools = Sequence[NodePool]
Counts = Mapping[str, int]  # pods by the name of their pool


def choose_pool(pools: Pools, now: float, waiting_since: float | None, counts: Counts) -> NodePool | None:
    """The pool of the next pod. None if no pool may have it now; so it is without pools, when any node will do.

    The first pool with room is taken. One that asks for patience (after_seconds) is taken in its place once workers
    have waited that long, because then those before it do not deliver. waiting_since: of the worker that has been
    missing longest, over all pods that were made for it; None if none has waited.
    """
    waited = 0.0 if waiting_since is None else now - waiting_since
    chosen: NodePool | None = None
    for pool in pools:
        if not _has_room(pool, counts):
            continue
        if (pool.after_seconds and waited >= pool.after_seconds) or (chosen is None and not pool.after_seconds):
            chosen = pool
    return chosen


def fallback_pool(pools: Pools, current: str, now: float, waiting_since: float, counts: Counts) -> NodePool | None:
    """The later pool in which a pod that finds no node in its current one should be made anew; None to go on waiting.

    counts: with the pod itself.
    """
    target = choose_pool(pools, now, waiting_since, counts)
    order = _order(pools)
    if target is None or order[target.name] <= order.get(current, -1):
        return None
    return target if target.after_seconds else None


def is_fallback(pools: Pools, name: str) -> bool:
    """Is that pool used only when those before it do not deliver?"""
    return any(pool.name == name and pool.after_seconds and index for index, pool in enumerate(pools))


def pool_to_probe(pools: Pools, counts: Counts, waiting: Counts) -> NodePool | None:
    """The pool in which one worker more than needed should be asked for, so that one can be given back for it.

    That is the first pool before one with `after_seconds` that has workers. Only by asking is it known that there are
    nodes again. waiting: pods without a node; nothing is tried while there are any before the fallback.
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
    """The worker of a pool with `after_seconds` to be given back now, as a ready worker of an earlier pool replaces it.

    One at a time: None while any worker is leaving. placed: the pool of each worker; standby: those that are ready and
    hold no stage; keep: how many of them must be left. A standby worker is given back first; it is in nobody's way.
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


def price_per_hour(pools: Pools, counts: Counts) -> Decimal | None:
    """What the workers cost in an hour; None if no pool has a price. Pools without one count nothing."""
    prices = {pool.name: pool.price_per_hour for pool in pools if pool.price_per_hour is not None}
    if not prices:
        return None
    return sum((price * counts.get(name, 0) for name, price in prices.items()), Decimal(0))


def cost_of(per_hour: Decimal | None, seconds: float) -> Decimal:
    """What that many seconds cost at that price."""
    return (per_hour or Decimal(0)) * Decimal(round(seconds * 1000)) / 3_600_000


def _has_room(pool: NodePool, counts: Counts) -> bool:
    return pool.max_workers is None or counts.get(pool.name, 0) < pool.max_workers


def _order(pools: Pools) -> dict[str, int]:
    return {pool.name: index for index, pool in enumerate(pools)}
